"""Training through the SDK, against SkyRL tx 0.3.0 on the same machine: `python -m bench.skyrl` prints one JSON line.

Each server is driven by the `tinker` SDK that it speaks (SkyRL 0.16.1, Bloomery 0.38.0), one after the other, with the same model, batches and rank;
a step is `forward_backward` and `optim_step`, from submission to both results. Ours is measured twice: plain (cross_entropy), and bit-exact, with a
loss whose forward has the sampler's bits (importance_sampling). SkyRL compiles per shape: its first steps are not counted, and neither are ours.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Qwen3Config

from bench.machine import machine
from bench.peers import python_of
from bench.shapes import Shape, write_directory
from bloomery.cli.demo_server import serving

DRIVER: Final = Path(__file__).parent / "peers" / "tinker_steps.py"
SETTINGS: Final = {
    "4x256": (Shape(4096, 256, 4, 4, 2, 768), 8, 128),
    "8x512": (Shape(4096, 512, 8, 8, 4, 1536), 4, 256),
}
"""Shape, sequences, tokens of each."""
WARM_UP: Final = 3
PEER_BACKEND: Final = '{"max_lora_adapters":4,"max_lora_rank":16}'
START_S: Final = 300.0


def main() -> None:
    """Measure both models on both servers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model's file, and what both servers compute in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        sizes = {name: _size(Path(place) / name, *setting, options.steps, options.dtype) for name, setting in SETTINGS.items()}
    setting = {"rank": 8, "steps": options.steps, "threads": os.cpu_count(), "device": "cpu", "dtype": options.dtype}
    print(json.dumps({"bench": "skyrl", **machine(), **setting, "peer": f"skyrl-tx 0.3.0, backend {PEER_BACKEND}", **sizes}))


def _size(place: Path, shape: Shape, sequences: int, tokens: int, steps: int, dtype: str) -> dict[str, Any]:
    model = write_directory(shape, place / "model", getattr(torch, dtype))
    with _skyrl(_for_transformers_4(model, place / "peer-model")) as (url, name):
        theirs = _drive(python_of("tinker-0.16"), url, "tml-none", name, "cross_entropy", sequences, tokens, steps)
    with serving(str(model), keep=False, dtype=dtype) as server:
        ours, exact = (
            _drive(Path(sys.executable), server.url, server.key, "model", loss, sequences, tokens, steps)
            for loss in ("cross_entropy", "importance_sampling")
        )
    speeds = {name: round(sequences * tokens / found["median_s"]) for name, found in (("skyrl", theirs), ("plain", ours), ("exact", exact))}
    ratios = {"ratio": round(speeds["plain"] / speeds["skyrl"], 2), "exact_ratio": round(speeds["exact"] / speeds["skyrl"], 2)}
    return {"tokens_per_s": speeds, **ratios, "loss": ours["loss"], "skyrl_loss": theirs["loss"]}


def _drive(python: Path, url: str, key: str, model: str, loss: str, sequences: int, tokens: int, steps: int) -> dict[str, float]:
    argv = [python, DRIVER, url, key, model, loss, *map(str, (sequences, tokens, steps + WARM_UP))]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "TINKER_TELEMETRY": "0"}).stdout
    found = json.loads(printed.splitlines()[-1])
    return {"median_s": statistics.median(found["seconds"][WARM_UP:]), "loss": round(found["loss"], 4)}


def _for_transformers_4(model: Path, place: Path) -> Path:
    """The same weights as the peer's older transformers reads them."""
    place.mkdir()
    for file in model.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "config.json").read_text())
    config["rope_theta"] = Qwen3Config.from_pretrained(model).rope_parameters["rope_theta"]
    del config["rope_parameters"]
    (place / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return place


@contextmanager
def _skyrl(model: Path) -> Iterator[tuple[str, str]]:
    python = python_of("skyrl")
    environment = python.parents[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Path(tempfile.mkdtemp(prefix="skyrl-", dir=model.parent))
    argv = [python, "-m", "tx.tinker.api", "--host", "127.0.0.1", "--port", str(port), "--base-model", model]
    argv += ["--checkpoints-base", place / "checkpoints", "--database-url", f"sqlite:///{place}/t.db", "--backend-config", PEER_BACKEND]
    # It starts its engine through `uv run`, which looks for these.
    found = {"VIRTUAL_ENV": str(environment), "PATH": f"{environment}/bin:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with (place / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=place, env={**os.environ, **found}, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/docs", process, place / "log")
        yield f"http://127.0.0.1:{port}", str(model)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the peer did not come up:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
