"""Graders that attack: nothing gets through, whoever does harm has no score, and the next one is graded as if nothing had been."""

import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import bloomery
from bloomery.grade import container
from bloomery.grade.pool import Graders, Limits, Program
from bloomery.types.grading import GradeInput, GradeResult, Sample
from tests.grade.attacks import ATTACKS, CALLS, Attack, source

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_s=2.0, load_s=20.0, memory_bytes=256 << 20, disk_bytes=16 << 20)
SOUND = Program("def grade(output):\n    return 0.75", "grade")
SECRET = os.urandom(16).hex()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["L1", pytest.param("L2", marks=pytest.mark.slow)])
async def graders(request: pytest.FixtureRequest) -> AsyncIterator[Graders]:
    if request.param == "L2" and (why := container.missing()) is not None:
        pytest.skip(why)
    async with Graders(level=request.param, places=2) as found:
        yield found


@pytest.fixture
def item(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Where things are that a grader would like to have."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "api_key").write_text(SECRET)
    package = Path(bloomery.__file__).parent
    files = ["/etc/passwd", "/etc/shadow", "/root", "/home", "/", str(data), str(data / "api_key"), str(package / "doctor.py"), str(package.parent)]
    proc = [
        f"/proc/{who}/{what}" for who in (1, os.getpid(), "self") for what in ("environ", "maps", "mem", "cmdline", "fd", "root", "cwd", "status")
    ]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        yield {
            "places": files,
            "proc": ["/proc", *proc, "/sys", "/proc/meminfo"],
            "directories": [str(data), str(package), str(Path.home())],
            "pid": os.getpid(),
            # Backwards, so that the row itself is not what is found.
            "secret": SECRET[::-1],
            "socket": str(tmp_path / "socket"),
        }


def row(attack: Attack, item: dict[str, object]) -> GradeInput:
    places = item["proc"] if "/proc" in attack.name else item["places"]
    return GradeInput(item={**item, "places": places, "calls": CALLS.get(attack.name, ())}, sample=Sample(output_text="text"))


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
async def test_an_attack_gets_nothing_and_harms_nobody_else(graders: Graders, attack: Attack, item: dict[str, object]) -> None:
    os.environ["BLOOMERY_TEST_SECRET"] = SECRET
    (result,) = await graders.grade(Program(source(attack), "grade"), [row(attack, item)], LIMITS)
    assert_as_told(attack, result)
    (after,) = await graders.grade(SOUND, [row(attack, item)], LIMITS)
    assert after.score == 0.75
    assert (Path(str(item["directories"][0])) / "api_key").read_text() == SECRET  # type: ignore[index]


def assert_as_told(attack: Attack, result: GradeResult) -> None:
    if attack.kind is None:
        assert result.error is None, result.error
        assert result.score == 0.0
    else:
        assert result.error is not None, result.score
        assert result.error.kind == attack.kind, result.error
        assert re.search(attack.says, result.error.detail), result.error.detail
        assert len(result.error.detail) < 5000


HARMFUL = [attack for attack in ATTACKS if attack.kind is not None and attack.only_itself]


@pytest.mark.parametrize("attack", HARMFUL, ids=[attack.name for attack in HARMFUL])
async def test_only_the_grade_that_does_harm_fails(graders: Graders, attack: Attack, item: dict[str, object]) -> None:
    """Three of one batch in one process: the one in the middle attacks."""
    code = source(attack) + "\n_attack = grade\ndef entry(item, output):\n    return 0.5 if output == 'sound' else _attack(**{_name: output})\n"
    code = code.replace("_name", repr("item" if "def grade(item)" in code else "output"))
    sound = row(attack, item).model_copy(update={"sample": Sample(output_text="sound")})
    results = await graders.grade(Program(code, "entry"), [sound, row(attack, item), sound], LIMITS)
    assert [result.score for result in results] == [0.5, None, 0.5]
    assert_as_told(attack, results[1])
