"""The attacks as `docs/security.md` tells them: each is one that a test tries, and says what comes of it as that test finds it."""

import re

from bloomery.grade import pool
from bloomery.grade.pool import Limits
from tests.cookbook.setup import ROOT
from tests.grade.attacks import ATTACKS

PAGE = (ROOT / "docs" / "security.md").read_text()


def rows() -> dict[str, str]:
    """What comes of each attack, by what is tried."""
    section = PAGE.split("## The attacks")[1].split("\n# ")[0]
    found = re.findall(r"^\| (?!what the grader tries|---)(.+?) \| (.+) \|$", section, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_page_tells_of_every_attack_that_is_tried_and_of_no_other() -> None:
    assert [*rows()] == [attack.name for attack in ATTACKS]


def test_the_page_names_the_failure_that_the_test_finds() -> None:
    told = rows()
    for attack in ATTACKS:
        kinds = re.findall(r"`(\w+)`", told[attack.name])
        assert (attack.kind in kinds) if attack.kind else not kinds, attack.name


def test_the_page_tells_the_limits_as_they_are() -> None:
    usual = Limits()
    assert f"{usual.wall_s:g} s unless it says otherwise, {pool.WALL_S:g} s at most; {usual.load_s:g} s for running the module" in PAGE
    assert f"{usual.memory_bytes >> 30} GiB of addresses, {pool.MEMORY_BYTES >> 30} GiB at most" in PAGE
    assert f"{usual.disk_bytes >> 20} MiB on disk, {pool.DISK_BYTES >> 20} at most" in PAGE
    assert f"less than {pool.SOURCE_BYTES:,} bytes" in PAGE
    assert f"had its turn ({pool.TURN_S:g} s)" in PAGE
