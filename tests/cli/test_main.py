import os
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bloomery import __version__
from bloomery.cli.main import app
from bloomery.config.data_dir import DataDir
from bloomery.doctor import Finding, examine
from bloomery.up.children import REPLICA, ROLLOUTS
from bloomery.up.lock import Holder, locked
from tests.live import BLOOMERY, running_server
from tests.up.builders import data_dir, giant, model

COMMANDS = ["up", "demo", "stop", "status", "logs", "doctor", "export", "backup", "restore", "gc"]


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
    assert not (tmp_path / "data").exists()


def refused_up(data: Path, *options: str, **environment: str) -> str:
    """What `bloomery up` says instead of starting."""
    argv = [BLOOMERY, "up", "--data-dir", str(data), *options]
    done = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr


@pytest.mark.slow
def test_a_port_in_use_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused_up(tmp_path / "deep" / "data", "--port", port, "--model", str(model(tmp_path / "mine")))
    assert said == f"error: cannot listen on 127.0.0.1:{port} (Address already in use): stop what listens there, or choose another --port\n"
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_a_host_that_is_not_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    said = refused_up(tmp_path / "deep" / "data", "--port", "0", "--host", "198.51.100.7", BLOOMERY_API_KEY="tml-chosen-by-the-operator")
    assert "cannot listen on 198.51.100.7:0" in said
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_a_model_that_needs_more_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert "giant needs 2499.4 GB, " in refused_up(tmp_path / "deep" / "data", "--port", "0", "--model", str(giant(tmp_path / "giant")))
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_a_key_that_clients_would_refuse_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert "BLOOMERY_API_KEY must start with tml-" in refused_up(tmp_path / "deep" / "data", "--port", "0", BLOOMERY_API_KEY="sk-of-somebody-else")
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "wants"),
    [
        ("BLOOMERY_CHECKPOINT_SECONDS", "often", "a number of seconds"),
        ("BLOOMERY_CHECKPOINT_SECONDS", "nan", "a number of seconds"),
        ("BLOOMERY_CHECKPOINT_BYTES", "64M", "a whole number of bytes"),
        ("BLOOMERY_CHECKPOINT_BYTES", "-1", "a whole number of bytes"),
    ],
)
def test_a_variable_without_sense_is_refused_by_its_name_before_anything_is_written(tmp_path: Path, variable: str, value: str, wants: str) -> None:
    said = refused_up(tmp_path / "deep" / "data", "--port", "0", **{variable: value})
    assert said == f"error: {variable} is `{value}`: set it to {wants}, 0 or more, or unset it\n"
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "says"), [("cuda:99", "torch has no such device here ("), ("gpu", "give cpu, cuda or cuda:N")])
def test_a_device_that_is_not_here_is_refused_before_anything_is_written(tmp_path: Path, device: str, says: str) -> None:
    said = refused_up(tmp_path / "deep" / "data", "--port", "0", "--device", device)
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_processes_log_at_the_level_that_up_was_given(tmp_path: Path) -> None:
    for level, expected in (("warning", False), ("debug", True)):
        with running_server(tmp_path / level, "--log-level", level) as server:
            for process in ("api", "engine-bloomery-tiny"):
                assert (" INFO " in DataDir(server.data_dir).log(process).read_text()) is expected


@pytest.mark.parametrize("command", [["stop"], ["status"], ["key", "list"]])
def test_without_a_server_there_is_nothing_to_stop_or_show_and_another_directory_may_have_one(tmp_path: Path, command: list[str]) -> None:
    start = f"start one with `bloomery up --data-dir {tmp_path}`"
    said = refusal(run(*command, "--data-dir", str(tmp_path)))
    assert said == f"error: no server is running on {tmp_path}: {start}, or name the directory of yours with --data-dir"


def test_where_no_server_has_run_there_are_no_logs_and_another_directory_may_have_them(tmp_path: Path) -> None:
    for process in ([], ["engine"]):
        said = refusal(run("logs", *process, "--data-dir", str(tmp_path)))
        assert said == f"error: no logs in {tmp_path}/logs, so no server has run there: name the directory of yours with --data-dir"


def test_logs_show_the_end_of_every_process(tmp_path: Path) -> None:
    data = data_dir(tmp_path)
    data.log("api").write_text("one\ntwo\nthree\n")
    data.log("engine-tiny").write_text("four\n")
    assert run("logs", "--data-dir", str(tmp_path), "-n", "2").stdout == "api | two\napi | three\nengine-tiny | four\n"
    assert run("logs", "engine", "--data-dir", str(tmp_path)).stdout == "four\n"
    data.log(f"{ROLLOUTS}tiny-1").write_text("five\n")
    assert run("logs", "rollouts", "--data-dir", str(tmp_path)).stdout == "five\n"
    assert "no log of `web`" in refusal(run("logs", "web", "--data-dir", str(tmp_path)))


def test_the_help_of_logs_names_every_kind_of_replica() -> None:
    said = run("logs", "--help").stdout
    assert [kind for kind in (REPLICA, ROLLOUTS) if f"{kind}NAME-N" not in said] == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_doctor_names_versions_and_says_whether_bits_agree(tmp_path: Path) -> None:
    argv = [BLOOMERY, "doctor", "--data-dir", str(tmp_path / "data"), "--model", str(model(tmp_path / "mine")), "--threads", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    findings = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert findings["bloomery"].strip() == __version__
    assert findings["torch"].strip().startswith("2.13.0")
    assert findings["graders"].strip().startswith("L1, jailed: no new privileges, Landlock ABI ")
    assert findings["bit-exact mode"].strip().startswith(("holds for mine", "does not hold for mine"))
    assert done.stdout.endswith("nothing is missing\n")


def foreign(root: Path) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("years of work")


def newer(root: Path) -> None:
    data_dir(root).version.write_text("99\n")


def newer_tables(root: Path) -> None:
    with closing(sqlite3.connect(data_dir(root).database)) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('0999')")


def damaged(root: Path) -> None:
    data_dir(root).version.write_text("one\n")


def not_a_directory(root: Path) -> None:
    root.write_text("a file")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [foreign, newer, newer_tables, damaged, not_a_directory])
def test_doctor_finds_what_up_would_refuse_and_says_it_in_the_same_words(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    data = tmp_path / "data"
    spoil(data)
    before = sorted(data.rglob("*"))
    refused = refused_up(data, "--port", "0", "--model", str(model(tmp_path / "mine")))
    assert refused == f"error: {data_directory(data).problem}\n"
    assert sorted(data.rglob("*")) == before


@pytest.mark.slow
def test_a_directory_that_its_own_server_uses_is_refused_to_another_and_is_no_problem_of_the_machine(tmp_path: Path) -> None:
    data, server = tmp_path / "data", Holder(pid=os.getpid(), host="127.0.0.1", port=8701, started_us=1, runtime_dir="")
    with locked(data_dir(data)) as lock:
        lock.announce(server)
        before = sorted(data.rglob("*"))
        where = f"in use by process {server.pid}, which serves {server.url}"
        assert f"error: {data} is {where}: stop it" in refused_up(data, "--port", "0", "--model", str(model(tmp_path / "mine")))
        assert data_directory(data) == Finding("data directory", f"layout 1, {where}: see `bloomery status --data-dir {data}`")
        assert sorted(data.rglob("*")) == before


def data_directory(data: Path) -> Finding:
    """What doctor says of it."""
    (finding,) = [finding for finding in examine(data, ["none"], "float32", 1) if finding.topic == "data directory"]
    return finding


def test_doctor_calls_a_data_directory_that_up_would_refuse_missing(tmp_path: Path) -> None:
    foreign(tmp_path / "data")
    result = run("doctor", "--data-dir", str(tmp_path / "data"), "--model", "gpt-5")
    assert result.exit_code == 1
    assert f"missing: {tmp_path / 'data'} holds files that are not Bloomery's: give an empty" in result.stderr


def test_doctor_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    (directory / "tokenizer.json").unlink()
    result = run("doctor", "--data-dir", str(tmp_path / "data"), "--model", str(directory))
    assert result.exit_code == 1
    assert "has no tokenizer.json" in result.stderr
