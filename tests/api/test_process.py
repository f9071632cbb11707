"""The process: it answers before its engines do, and a signal stops it cleanly."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from bloomery.config import ApiConfig, ModelConfig, to_json
from tests.live import free_port, wait_until
from tests.render.builders import chatml_directory, small_config


def test_the_process_answers_and_stops_cleanly(tmp_path: Path) -> None:
    model = chatml_directory(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(small_config(400)))
    base = ModelConfig(alias="tiny", path=str(model), base_hash="b", dtype="float32", threads=1, socket=str(tmp_path / "nobody"))
    config = ApiConfig(data_dir=str(tmp_path), host="127.0.0.1", port=free_port(), record="full", models=(base,))
    (tmp_path / "api.json").write_text(to_json(config))
    (tmp_path / "api_key").write_text("tml-development-key\n")
    argv = [sys.executable, "-m", "bloomery.api", str(tmp_path / "api.json")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=few_open_files)
    try:
        answer = first_answer(f"http://127.0.0.1:{config.port}/healthz")
        assert (answer.status_code, answer.json()["waiting_for"]) == (503, ["tiny"])
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log
    assert "was not drained" in log  # the services were closed, not abandoned


def few_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def first_answer(url: str) -> httpx.Response:
    wait_until(lambda: answers(url))
    return httpx.get(url)


def answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True
