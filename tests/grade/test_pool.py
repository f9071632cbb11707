"""Grading in jails as services do it: batches and what they share, limits, turns, and what happens when processes die."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

import bloomery
from bloomery.grade import pool
from bloomery.grade.pool import Graders, Limits, Program
from bloomery.grade.processes import Channel, Garbled, level
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.grading import GradeInput, GradeResult, Sample
from tests.live import wait_until

SOUND = Program("def grade(output):\n    return float(output)", "grade")
COUNTING = Program("count = 0\ndef grade(output):\n    global count\n    count += 1\n    return count", "grade")
HANGING = Program("import time\ndef grade(output):\n    if output == 'hang':\n        time.sleep(1000)\n    return float(output)", "grade")
_DEADLINE_S = 120.0


def inputs(*outputs: str, **item: Any) -> list[GradeInput]:
    return [GradeInput(item=item, sample=Sample(output_text=output)) for output in outputs]


@pytest.fixture
async def graders() -> AsyncIterator[Graders]:
    async with Graders(places=1) as found:
        yield found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def fork_server() -> int:
    """The one child of ours that serves forks."""
    (found,) = [child for child in children(os.getpid()) if b"bloomery.grade.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_batch_has_its_results_in_its_order(graders: Graders) -> None:
    results = await graders.grade(SOUND, inputs("1", "0.5", "no number", "2"))
    assert [result.score for result in results] == [1.0, 0.5, None, 2.0]
    assert results[2].error is not None
    assert results[2].error.detail == "line 2, in grade: ValueError: could not convert string to float: 'no number'"
    assert await graders.grade(SOUND, []) == []


async def test_what_a_batch_leaves_behind_is_seen_in_it_and_nowhere_else(graders: Graders) -> None:
    assert [result.score for result in await graders.grade(COUNTING, inputs("", "", ""))] == [1.0, 2.0, 3.0]
    assert [result.score for result in await graders.grade(COUNTING, inputs(""))] == [1.0]
    assert [result.score for result in await graders.grade(COUNTING, inputs("", "", ""), isolate=True)] == [1.0, 1.0, 1.0]


async def test_a_directory_is_its_processes_own_and_removed_afterwards(graders: Graders) -> None:
    source = (
        "from pathlib import Path\nimport os\ndef grade(output):\n    seen = len(os.listdir('.'))\n    Path(output).write_text('x')\n    return seen"
    )
    program = Program(source, "grade")
    assert [result.score for result in await graders.grade(program, inputs("a", "b"))] == [0.0, 1.0]
    assert [result.score for result in await graders.grade(program, inputs("c"))] == [0.0]
    assert [*Path(tempfile.gettempdir()).glob("bloomery-graders-*/*/a")] == []


async def test_after_a_timeout_the_rest_goes_on_in_a_fresh_process(graders: Graders) -> None:
    results = await graders.grade(HANGING, inputs("1", "hang", "2"), Limits(wall_s=2.0))
    assert [result.score for result in results] == [1.0, None, 2.0]
    assert results[1].error is not None
    assert (results[1].error.kind, results[1].error.detail) == ("timeout", "it took longer than 2 s")


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("import time\ntime.sleep(1000)", "timeout", "while it was loaded: it took longer than 2 s"),
        ("import os\nos._exit(7)", "killed", "while it was loaded: its process ended with status 7"),
        ("print('first')\n1 / 0", "raised", "while it was loaded: line 2, in <module>: ZeroDivisionError: division by zero\nit printed: first"),
        ("def grade(", "raised", "while it was loaded: SyntaxError"),
        ("import torch_that_is_not_there", "raised", "ModuleNotFoundError"),
        ("x = bytearray(3 << 30)", "memory", "while it was loaded: line 1, in <module>: MemoryError"),
        ("other = 1", "raised", "the source has no function `grade`"),
    ],
)
async def test_a_program_that_cannot_be_loaded_is_tried_once(graders: Graders, source: str, kind: str, says: str) -> None:
    program, limits = Program(source, "grade"), Limits(load_s=2.0) if kind == "timeout" else Limits()
    results = await graders.grade(program, inputs("1", "2", "3"), limits)
    assert len(results) == 3
    for result in results:
        assert result.error is not None
        assert result.error.kind == kind
        assert says in result.error.detail
    found = await graders.check(program, limits)
    assert found is not None
    assert found.kind == kind
    assert await graders.check(SOUND) is None


async def test_functions_of_whole_batches_are_called_once(graders: Graders) -> None:
    program = Program("def reward(prompts, completions, answer, **columns):\n    return [len(completions), None, answer[2]]", "reward")
    results = await graders.grade(program, inputs("a", "b", "c", prompt="why", answer=7))
    assert [result.score for result in results] == [3.0, None, 7.0]


async def test_rows_and_texts_of_every_kind_come_through(graders: Graders) -> None:
    text = "naïve \u0000 \U0001f600 " + "x" * 1_000_000
    program = Program("def grade(output, item):\n    return len(output) if item['deep'] == [{'a': [None, 1.5]}] else None", "grade")
    (result,) = await graders.grade(program, inputs(text, deep=[{"a": [None, 1.5]}]))
    assert result.score == len(text)


@pytest.mark.parametrize("level", ["L0", "L1"])
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def grade(output):\n    print('\\ud800 printed')\n    raise ValueError('\\udfff raised')", "Error: "),
        ("print('\\ud800 printed')\nraise ValueError('\\udfff raised')", "Error: "),
        ("def grade(output):\n    return {'score': 1, 'reason': '\\ud800 why', 'metrics': {'\\udfff': 2}}", "? why"),
        ("def grade(output):\n    return {'score': 1, 'is_score_valid': False, 'reason': '\\ud800 why'}", "? why"),
    ],
)
async def test_halves_of_characters_cost_no_grade_and_no_batch(level: Any, source: str, says: str) -> None:
    async with Graders(level=level) as graders:
        (result,) = await graders.grade(Program(source, "grade"), inputs("1"))
    assert says in (result.reason or "") + (result.error.detail if result.error else "")
    assert result.error is None or result.error.kind in ("raised", "no_score")
    assert GradeResult.model_validate_json(result.model_dump_json()) == result


async def test_a_channel_keeps_no_more_frames_than_it_may_whatever_follows_them() -> None:
    channel, frame = Channel(), struct.pack(">I", 2) + b"{}"
    channel.data_received(frame * 5000 + frame[:-1])
    with pytest.raises(Garbled):
        await channel.receive(asyncio.get_running_loop().time() + _DEADLINE_S)


async def test_numeric_libraries_work_in_a_jail(graders: Graders) -> None:
    source = """
import asyncio, concurrent.futures, datetime, decimal, hashlib, json, re, sqlite3, tempfile, zoneinfo
import numpy as np
async def grade(output):
    assert zoneinfo.ZoneInfo("UTC")
    with tempfile.TemporaryFile() as file:
        file.write(b"text")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(float, range(10))) == 45
    sqlite3.connect("file.db").execute("create table t (x)")
    await asyncio.sleep(0.001)
    assert await asyncio.to_thread(lambda: 3) == 3
    return np.linalg.norm(np.ones((50, 50)) @ np.ones((50, 50))) / 2500
"""
    (result,) = await graders.grade(Program(source, "grade"), inputs("1"))
    assert result.error is None, result.error
    assert result.score == pytest.approx(1.0)


async def test_a_batch_whose_turn_is_over_lets_others_go_first(graders: Graders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "TURN_S", 0.0)
    order: list[str] = []

    async def graded(name: str, count: int) -> list[float | None]:
        results = await graders.grade(COUNTING, inputs(*["x"] * count))
        order.append(name)
        return [result.score for result in results]

    long, short = await asyncio.gather(graded("long", 30), graded("short", 1))
    assert order == ["short", "long"]
    assert short == [1.0]
    assert len(long) == 30
    assert long.count(1.0) > 1, "it went on in a fresh process"


async def test_who_gets_no_place_in_time_is_told_so() -> None:
    async with Graders(places=1, wait_s=0.2) as graders:
        busy = asyncio.create_task(graders.grade(HANGING, inputs("hang"), Limits(wall_s=3.0)))
        await asyncio.sleep(0)
        (result,) = await graders.grade(SOUND, inputs("1"))
        assert result.error is not None
        assert (result.error.kind, result.error.detail) == ("unavailable", "no place for a grader within 0.2 s: all of them are busy")
        busy.cancel()
        await asyncio.wait([busy])
        # The place is free once the process that was given up is gone.
        async with asyncio.timeout(60):
            while (after := (await graders.grade(SOUND, inputs("1")))[0]).score is None:
                assert after.error is not None
                assert after.error.kind == "unavailable"
        assert after.score == 1.0


async def test_whoever_stops_waiting_leaves_no_process_behind(graders: Graders) -> None:
    grading = asyncio.create_task(graders.grade(HANGING, inputs("hang"), Limits(wall_s=60.0)))
    await graders.obtained()
    server = fork_server()
    await until(lambda: len(children(server)) == 1)
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    await until(lambda: children(server) == [])


async def test_a_fork_server_that_dies_takes_its_forks_with_it_and_is_started_again(graders: Graders) -> None:
    source = """
import pathlib, time
def grade(output):
    if output == "hang":
        pathlib.Path("begun").touch()
        time.sleep(1000)
    return 1
"""
    grading = asyncio.create_task(graders.grade(Program(source, "grade"), inputs("1", "hang", "2"), Limits(wall_s=60.0)))
    await graders.obtained()
    server = fork_server()
    *_, work = Path(f"/proc/{server}/cmdline").read_text().strip("\0").split("\0")
    await until(lambda: [*Path(work).glob("*/begun")] != [])
    (fork,) = children(server)
    os.kill(server, signal.SIGKILL)
    await until(lambda: gone(fork))
    results = await grading
    assert [result.score for result in results] == [1.0, None, 1.0], "the rest was graded by a new one"
    assert results[1].error is not None
    assert results[1].error.kind == "unavailable"
    assert fork_server() != server
    assert not Path(work).exists()


async def until(true: Any) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_fork_server_that_cannot_be_started_is_nobodys_score_and_leaves_nothing(
    graders: Graders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    (result,) = await graders.grade(SOUND, inputs("1"))
    assert result.error is not None
    assert (result.error.kind, result.error.detail) == ("unavailable", "the fork server of graders could not be started: No such file or directory")
    assert [*tmp_path.iterdir()] == []
    monkeypatch.undo()
    assert [result.score for result in await graders.grade(SOUND, inputs("1"))] == [1.0]


def test_fork_servers_and_forks_die_with_their_parent() -> None:
    code = """
import asyncio
from tests.grade.test_pool import *
async def main():
    async with Graders(places=1) as graders:
        grading = asyncio.create_task(graders.grade(HANGING, inputs("hang"), Limits(wall_s=100.0)))
        await graders.obtained()
        server = fork_server()
        await until(lambda: len(children(server)) == 1)
        *_, work = Path(f"/proc/{server}/cmdline").read_text().strip("\\0").split("\\0")
        print(work, server, *children(server), flush=True)
        await grading
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        work, *found = process.stdout.readline().split()
        pids = [int(pid) for pid in found]
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: all(gone(pid) for pid in pids) and not Path(work).exists(), _DEADLINE_S)


async def test_a_fork_server_knows_no_variable_of_ours_and_has_loaded_nothing_heavy(graders: Graders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOOMERY_API_KEY", "secret")
    await graders.obtained()
    assert Path(f"/proc/{fork_server()}/environ").read_bytes() == b""
    source = """
import sys
def grade(output):
    ours = {name for name in sys.modules if name.partition(".")[0] == "bloomery"}
    assert ours == {"bloomery", "bloomery.grade", *(f"bloomery.grade.{name}" for name in output.split())}, ours
    return len({"numpy", "pydantic", "msgspec", "asyncio", "torch"} & set(sys.modules))
"""
    (result,) = await graders.grade(Program(source, "grade"), inputs("calling forkserver inside jail landlock libc seccomp work"))
    assert result.score == 0.0, result.error


async def test_errors_tell_no_directory_of_the_server(graders: Graders) -> None:
    (result,) = await graders.grade(Program("def grade(output):\n    open('/etc/ssl/../passwd')", "grade"), inputs("1"))
    assert result.error is not None
    assert result.error.detail == "line 2, in grade: PermissionError: [Errno 13] Permission denied: 'passwd'"


def test_the_loop_that_the_api_runs_on_is_as_good() -> None:
    async def graded() -> list[float | None]:
        async with Graders(places=1) as graders:
            results = await graders.grade(HANGING, inputs("1", "hang", "2"), Limits(wall_s=2.0))
            return [result.score for result in results]

    assert uvloop.run(graded()) == [1.0, None, 2.0]


def test_the_level_is_found_out_in_throw_away_processes() -> None:
    found = level()
    assert found.level == "L1", found.reason
    assert found.layers[0] == "no new privileges"
    assert children(os.getpid()) == [] or all(b"bloomery.grade" not in Path(f"/proc/{child}/cmdline").read_bytes() for child in children(os.getpid()))


async def test_where_there_is_no_jail_nothing_is_graded_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that is told of another processor finds no list of system calls for it."""
    code = "import platform\nplatform.machine = lambda: 'riscv64'\n"
    monkeypatch.setattr("bloomery.grade.processes._CODE", code + _code())
    async with Graders() as graders:
        with pytest.raises(NotSupported, match=r"jail \(level L1\), and this machine gives none: there is no list of system calls for the processor"):
            await graders.grade(SOUND, inputs("1"))
    assert level().level == "L0"


def _code() -> str:
    from bloomery.grade import processes

    return processes._CODE


def test_another_machine_is_refused_by_name() -> None:
    with pytest.raises(NotSupported, match="L3, on another machine, is not offered"):
        Graders(level="L3")


async def test_trusted_graders_run_in_this_process() -> None:
    source = "import os\ndef grade(output):\n    if output == 'hang':\n        import time\n        time.sleep(3)\n    return os.getpid()"
    async with Graders(level="L0") as graders:
        assert (await graders.obtained()).level == "L0"
        (result,) = await graders.grade(Program(source, "grade"), inputs("x"))
        assert result.score == os.getpid()
        (result,) = await graders.grade(Program(source, "grade"), inputs("hang"), Limits(wall_s=0.5))
        assert result.error is not None
        assert result.error.kind == "timeout"
        assert await graders.check(Program(source, "grade")) is None
        assert (await graders.check(Program("1 / 0", "grade"))) is not None


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"wall_s": 121}, "wall_s"),
        ({"wall_s": 0}, "wall_s"),
        ({"memory_bytes": 3 << 30}, "memory_bytes"),
        ({"disk_bytes": 1 << 30}, "disk_bytes"),
        ({"load_s": 61}, "load_s"),
    ],
)
def test_limits_have_maxima(limits: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Limits(**limits)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("program", "field"),
    [(("x" * 256_000, "grade"), "source"), (("", "not a name"), "entry"), (("", "grade", "other"), "style")],
    ids=["source", "entry", "style"],
)
def test_programs_are_looked_at_before_they_run(program: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Program(*program)
    assert refused.value.field == field


def test_the_jail_needs_no_more_than_the_standard_library() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import bloomery.grade.forkserver; print(*sys.modules)"
    root = str(Path(bloomery.__file__).parent.parent)
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - {"bloomery", "__main__"} <= sys.stdlib_module_names
