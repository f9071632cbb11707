import socket
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bloomery import __version__
from bloomery.cli.main import app
from bloomery.config.data_dir import DataDir
from tests.live import BLOOMERY
from tests.up.builders import data_dir, model

COMMANDS = ["up", "demo", "stop", "status", "logs", "doctor", "backup", "restore", "gc"]


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def refusal(result: Result) -> str:
    """The one line of a user error."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_help_names_every_command() -> None:
    said = run("--help").stdout
    assert all(f" {command} " in said for command in COMMANDS)


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == f"{__version__}\n"


def test_an_unknown_model_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    said = refusal(run("up", "--data-dir", str(tmp_path / "data"), "--model", "gpt-5"))
    assert said == "error: unknown model `gpt-5`: give bloomery-tiny or a directory that save_pretrained wrote"
    assert not (tmp_path / "data").exists()


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    (directory / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(run("up", "--data-dir", str(tmp_path / "data"), "--model", str(directory)))
    assert not (tmp_path / "data").exists()


def test_other_machines_are_let_in_only_with_a_chosen_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOOMERY_API_KEY", raising=False)
    said = refusal(run("up", "--data-dir", str(tmp_path / "data"), "--host", "0.0.0.0"))
    assert "set BLOOMERY_API_KEY to a key of your own first" in said


def test_a_port_in_use_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [BLOOMERY, "up", "--data-dir", str(tmp_path / "data"), "--port", port, "--model", str(model(tmp_path / "mine"))]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port} (Address already in use): stop what listens there, or choose another --port\n"


@pytest.mark.parametrize("command", ["stop", "status"])
def test_without_a_server_there_is_nothing_to_stop_or_show(tmp_path: Path, command: str) -> None:
    assert f"no server is running on {tmp_path}: start one" in refusal(run(command, "--data-dir", str(tmp_path)))


def test_logs_show_the_end_of_every_process(tmp_path: Path) -> None:
    data = data_dir(tmp_path)
    data.log("api").write_text("one\ntwo\nthree\n")
    data.log("engine-tiny").write_text("four\n")
    assert run("logs", "--data-dir", str(tmp_path), "-n", "2").stdout == "api | two\napi | three\nengine-tiny | four\n"
    assert run("logs", "engine", "--data-dir", str(tmp_path)).stdout == "four\n"
    assert "no log of `web`" in refusal(run("logs", "web", "--data-dir", str(tmp_path)))


def test_followed_logs_go_on_and_survive_rotation(tmp_path: Path) -> None:
    log = data_dir(tmp_path).log("api")
    log.write_text("old\n")
    argv = [BLOOMERY, "logs", "api", "-f", "-n", "1", "--data-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={"PYTHONUNBUFFERED": "1"}) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "old\n"
        with log.open("a") as file:
            file.write("new\n")
        assert follower.stdout.readline() == "new\n"
        log.write_text("")
        log.write_text("x\n")
        assert follower.stdout.readline() == "x\n"
        follower.kill()


def test_what_was_backed_up_is_restored(tmp_path: Path) -> None:
    data, archive, copy = data_dir(tmp_path / "data"), tmp_path / "saved.tar.zst", tmp_path / "copy"
    assert "files" in run("backup", str(archive), "--data-dir", str(data.root)).stdout
    assert f"bloomery up --data-dir {copy}" in run("restore", str(archive), "--data-dir", str(copy)).stdout
    assert DataDir(copy).api_key.read_text() == data.api_key.read_text()
    assert "is not empty" in refusal(run("restore", str(archive), "--data-dir", str(copy)))


def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refusal(run("restore", str(file), "--data-dir", str(file))).startswith(f"error: {file}: ")


def test_doctor_names_versions_and_says_whether_bits_agree(tmp_path: Path) -> None:
    argv = [BLOOMERY, "doctor", "--data-dir", str(tmp_path / "data"), "--model", str(model(tmp_path / "mine")), "--threads", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    findings = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert findings["bloomery"].strip() == __version__
    assert findings["torch"].strip().startswith("2.13.0")
    assert findings["bit-exact mode"].strip().startswith(("holds for mine", "does not hold for mine"))
    assert done.stdout.endswith("nothing is missing\n")


def test_doctor_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    (directory / "tokenizer.json").unlink()
    result = run("doctor", "--data-dir", str(tmp_path / "data"), "--model", str(directory))
    assert result.exit_code == 1
    assert "has no tokenizer.json" in result.stderr
