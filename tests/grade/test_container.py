"""Graders in a container: what is not there cannot even be seen, and whoever strikes it, nothing of it stays."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent

import pytest

import bloomery
from bloomery.config import GraderLevel
from bloomery.doctor import examine
from bloomery.grade import container, processes
from bloomery.grade.pool import DISK_BYTES, Graders, Limits, Program
from bloomery.grade.processes import level
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.grading import GradeInput, Sample
from bloomery.up import start
from tests.grade.test_pool import HANGING, children, gone, until

needs_bubblewrap = pytest.mark.skipif(container.missing() is not None, reason="this machine has no bubblewrap")
SEEN = Program("import os\ndef grade(item):\n    return sum(map(os.path.exists, item['places']))", "grade")


def row(*places: object) -> GradeInput:
    return GradeInput(item={"places": [*map(str, places)]}, sample=Sample(output_text="text"))


@needs_bubblewrap
async def test_of_the_machine_nothing_is_there_but_python(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("secret")
    outside = (tmp_path, tmp_path / "api_key", "/etc/passwd", "/usr/bin/env", "/bin/sh", "/var", "/sys", f"/proc/{os.getpid()}", Path(__file__))
    async with Graders(level="L2") as graders, Graders(level="L1") as jailed:
        (contained,) = await graders.grade(SEEN, [row(*outside)])
        (confined,) = await jailed.grade(SEEN, [row(*outside)])
        assert contained.score == 0.0
        # A jail alone does not hide whether a path exists.
        assert confined.score is not None
        assert confined.score > 0
        found = await graders.obtained()
    assert (found.level, found.layers[0]) == ("L2", container.LAYER)
    assert {"no new privileges", "a seccomp allow list"} <= set(found.layers)


@needs_bubblewrap
async def test_a_container_that_is_struck_takes_everything_in_it_along_and_the_next_one_grades(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with Graders(level="L2", places=1) as graders:
        grading = asyncio.create_task(graders.grade(HANGING, [GradeInput(item={}, sample=Sample(output_text="hang"))], Limits(wall_s=100.0)))
        await graders.obtained()
        assert graders._server is not None
        outer = graders._server._process.pid
        await until(lambda: len(below(outer)) >= 3)
        inside = below(outer)
        os.kill(outer, signal.SIGKILL)
        await until(lambda: all(map(gone, inside)))
        grading.cancel()
        (result,) = await graders.grade(SEEN, [row()])
        assert result.score == 0.0
        assert graders._server._process.pid != outer
        # Nothing was ever there, so that nothing is left by a server that is struck with it.
        assert not [*tmp_path.iterdir()]
    assert not container.WORK.exists()


@needs_bubblewrap
async def test_work_directories_are_memory_and_take_no_more_of_it_than_they_are_for() -> None:
    room = Program("import os\ndef grade(item):\n    found = os.statvfs('.')\n    return float(found.f_blocks * found.f_frsize)", "grade")
    async with Graders(level="L2", places=3) as graders:
        (result,) = await graders.grade(room, [row()])
    assert result.score == 3 * DISK_BYTES + (1 << 30)


@needs_bubblewrap
def test_an_interpreter_behind_a_symbolic_link_has_its_own_library_and_packages_in_there(tmp_path: Path) -> None:
    behind = tmp_path / "a link"
    behind.symlink_to(sys.prefix)
    grading = """
        import asyncio, os, pydantic
        from bloomery.grade.pool import Graders, Program
        from bloomery.types.grading import GradeInput, Sample
        source = "import os, pydantic\\ndef grade(item):\\n    return float([os.__file__, pydantic.__file__] == item['files'])"
        async def main():
            row = GradeInput(item={"files": [os.__file__, pydantic.__file__]}, sample=Sample(output_text=""))
            async with Graders(level="L2", places=1) as graders:
                print(pydantic.__file__, await graders.grade(Program(source, "grade"), [row]))
        asyncio.run(main())
    """
    around = {**os.environ, "PYTHONPATH": str(Path(bloomery.__file__).parent.parent)}
    interpreter = behind / Path(sys.executable).relative_to(sys.prefix)
    ran = subprocess.run([interpreter, "-c", dedent(grading)], cwd=tmp_path, env=around, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith(f"{behind}/")
    assert "score=1.0" in ran.stdout, ran.stdout


def bubblewrap_that(says: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, mode: int = 0o755) -> Path:
    """The only one that is found."""
    program = directory / "bin" / container.PROGRAM
    program.parent.mkdir()
    program.write_text(says)
    program.chmod(mode)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def test_a_container_that_never_begins_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bubblewrap_that("#!/bin/sh\nexec sleep 100\n", tmp_path, monkeypatch)
    monkeypatch.setattr(processes, "START_S", 0.2)
    found = level("L2")
    assert found.level == "L0"
    assert found.reason is not None
    assert "did not start within" in found.reason


FAILING = {
    "not executable": ("#!/bin/sh\n", 0o644, "bwrap` is not executable: make it so, or install bubblewrap"),
    "of no program": ("\x00 no program", 0o755, "bwrap` cannot be executed (Exec format error): install bubblewrap"),
    "of another interpreter": ("#!/none\n", 0o755, "bwrap` cannot be executed (No such file or directory): install bubblewrap"),
    "refused": (
        "#!/bin/sh\necho bwrap: first >&2\necho bwrap: No permissions >&2\nexit 1\n",
        0o755,
        "with status 1 while it started: bwrap: No perm",
    ),
    "struck": ("#!/bin/sh\nkill -9 $$\n", 0o755, "ended by SIGKILL while it started, and said nothing"),
}


@pytest.mark.parametrize("why", FAILING)
async def test_a_bubblewrap_that_fails_is_no_container_and_up_doctor_and_graders_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    says, mode, reason = FAILING[why]
    bubblewrap_that(says, tmp_path, monkeypatch, mode=mode)
    assert level("L2").level == "L0"
    told = problem(tmp_path, "L2")
    assert told is not None
    assert "code of graders is refused, because this machine does not give a jail in a container (level L2): " in told
    assert reason in told
    with pytest.raises(InvalidInput, match="--graders L2 takes a container, and this machine gives none: ") as refused:
        start._check_graders("L2")
    assert reason in refused.value.message
    async with Graders(level="L2") as graders:
        with pytest.raises(NotSupported, match=r"container \(level L2\), and this machine gives none"):
            await graders.grade(SEEN, [row()])
    # The jail alone needs none of it.
    assert problem(tmp_path, "L1") is None


def below(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *below(child))]


@pytest.mark.parametrize(("platform", "why"), [("linux", "apt-get install bubblewrap"), ("darwin", "this is darwin")])
async def test_where_there_is_no_container_nothing_is_graded_and_up_and_doctor_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, why: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bloomery.grade.container.sys.platform", platform)
    async with Graders(level="L2") as graders:
        with pytest.raises(NotSupported, match=rf"container \(level L2\), and this machine gives none: .*{why}"):
            await graders.grade(SEEN, [row()])
    assert level("L2").level == "L0"
    monkeypatch.setattr("bloomery.grade.container.sys.platform", "linux")
    with pytest.raises(InvalidInput, match="--graders L2 takes a container, and this machine gives none: there is no `bwrap`") as refused:
        start._check_graders("L2")
    assert refused.value.field == "graders"
    assert problem(tmp_path, "L1") is None
    told = problem(tmp_path, "L2")
    assert told is not None
    assert "does not give a jail in a container (level L2)" in told


def problem(directory: Path, asked: GraderLevel) -> str | None:
    """What `doctor` says of graders."""
    findings = examine(directory, ["unlikely=/none"], "float32", None, graders=asked)
    return next(finding.problem for finding in findings if finding.topic == "graders")
