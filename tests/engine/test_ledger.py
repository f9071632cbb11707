"""What an engine leaves for the next one to know."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.engine.ledger import CHECKPOINT, MAX_DEATHS, MAX_REPLAY_DEATHS, InHand, Ledger

ONE, TWO = InHand("run-1", 7), InHand("run-2", 3)


def death(path: Path, *in_hand: InHand) -> None:
    """An engine that dies with these in hand."""
    Ledger(path).enter(in_hand)


def test_what_was_in_hand_at_a_death_is_suspected_and_nothing_else(tmp_path):
    path = tmp_path / "engines" / "a.in-hand"
    ledger = Ledger(path)
    ledger.enter([ONE, TWO])
    ledger.enter([TWO])
    ledger = Ledger(path)
    assert ledger.suspects(TWO)
    assert not ledger.suspects(ONE)
    assert not ledger.condemns(TWO, replay=False)


def test_what_killed_often_enough_is_condemned_a_replay_later(tmp_path):
    path = tmp_path / "a.in-hand"
    for _ in range(MAX_DEATHS):
        assert not Ledger(path).condemns(ONE, replay=False)
        death(path, ONE)
    assert Ledger(path).condemns(ONE, replay=False)
    for _ in range(MAX_REPLAY_DEATHS - MAX_DEATHS):
        assert not Ledger(path).condemns(ONE, replay=True)
        death(path, ONE)
    assert Ledger(path).condemns(ONE, replay=True)


def test_a_result_clears_a_suspect(tmp_path):
    path = tmp_path / "a.in-hand"
    death(path, ONE)
    ledger = Ledger(path)
    ledger.enter([ONE])
    ledger.survived(ONE)
    assert not ledger.suspects(ONE)
    assert not Ledger(path).suspects(ONE)


def test_a_death_between_two_turns_is_nobodys_fault(tmp_path):
    path = tmp_path / "a.in-hand"
    ledger = Ledger(path)
    ledger.enter([ONE])
    ledger.survived(ONE)
    ledger.enter(())
    assert not Ledger(path).suspects(ONE)


def test_what_is_done_in_between_alone_is_in_hand_and_then_what_was(tmp_path):
    path, between = tmp_path / "a.in-hand", InHand("run-1", CHECKPOINT)
    ledger = Ledger(path)
    ledger.enter([ONE, TWO])
    ledger.survived(ONE)
    with ledger.instead(between):
        died = Ledger(shutil.copy(path, tmp_path / "b.in-hand"))
        assert died.suspects(between)
        assert not died.suspects(TWO)
    died = Ledger(shutil.copy(path, tmp_path / "c.in-hand"))
    assert died.suspects(TWO)
    assert not died.suspects(ONE)
    assert not died.suspects(between)


def test_a_clean_end_pardons(tmp_path):
    path = tmp_path / "a.in-hand"
    death(path, ONE)
    Ledger(path).close()
    assert not Ledger(path).suspects(ONE)


def test_a_torn_file_accuses_nobody(tmp_path):
    path = tmp_path / "a.in-hand"
    death(path, ONE, TWO)
    whole = path.read_bytes()
    for length in (0, 4, 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not Ledger(path).suspects(ONE)
    path.write_bytes(whole)
    assert Ledger(path).suspects(ONE)


# The child may write 16 bytes per file, which is less than any turn takes, and then as much as it likes.
FULL = """
import json, logging, resource, sys
from pathlib import Path
from bloomery.engine.ledger import InHand, Ledger

def room(bytes_per_file):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, resource.RLIM_INFINITY))

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

said, accused = [], []
logging.getLogger().addHandler(Said())
logging.getLogger().setLevel("INFO")
path, one, two = Path(sys.argv[1]), InHand("run-1", 7), InHand("run-2", 3)
if sys.argv[2] == "before it is there":
    room(16)
ledger = Ledger(path)
ledger.enter([one])
room(16)
for _ in range(3):
    ledger.enter([two])
    ledger.enter(())
ledger.enter([two])
accused.append(path.read_bytes().decode("latin1"))
room(resource.RLIM_INFINITY)
ledger.enter([two])
print(json.dumps([accused, said]))
"""


@pytest.mark.parametrize("when", ["before it is there", "while it is written"])
def test_a_full_disk_ends_no_engine_accuses_nobody_and_passes(tmp_path, when):
    path = tmp_path / "engines" / "a.in-hand"
    child = subprocess.run([sys.executable, "-c", FULL, str(path), when], capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    [meanwhile], said = json.loads(child.stdout)
    assert "run-" not in meanwhile
    assert [line.removeprefix(str(path)).partition(" (")[0] for line in said] == [" cannot be written", " can be written again"]
    ledger = Ledger(path)
    assert ledger.suspects(TWO)
    assert not ledger.suspects(ONE)


def test_a_ledger_that_cannot_be_read_accuses_nobody_and_is_written_when_it_can_be(tmp_path):
    path = tmp_path / "a.in-hand"
    path.mkdir()
    ledger = Ledger(path)
    ledger.enter([ONE])
    assert not ledger.suspects(ONE)
    path.rmdir()
    ledger.enter([ONE])
    assert Ledger(path).suspects(ONE)
