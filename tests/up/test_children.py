import os
import signal
import sys
from pathlib import Path

import pytest

from bloomery.obs.logs import LOG_FILE_BYTES
from bloomery.up.children import LONGEST_DELAY_S, MAX_UNREADY_DEATHS, Child, Program, describe_exit, restart_delay_s
from bloomery.up.cores import Placement
from tests.live import wait_until


def child(tmp_path: Path, code: str, socket: Path | None = None) -> Child:
    return Child(Program(name="child", argv=[sys.executable, "-c", code], env={}, log=tmp_path / "child.log", socket=socket))


def wait_for_death(mortal: Child) -> int:
    statuses: list[int] = []
    wait_until(lambda: (status := mortal.reap()) is not None and statuses.append(status) is None)
    return statuses[0]


def test_delays_double_after_short_lives_and_stay_bounded() -> None:
    assert [restart_delay_s(deaths) for deaths in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert restart_delay_s(50) == restart_delay_s(100_000) == LONGEST_DELAY_S


def waits(mortal: Child, lives: int) -> list[float]:
    """After each of so many lives, as was decided; what is left of it is less by the time that it takes to look."""
    found = []
    for _ in range(lives):
        mortal.start()
        assert mortal.starts_in_s is None
        wait_for_death(mortal)
        assert mortal.starts_in_s is not None
        assert mortal.starts_in_s <= mortal.delay_s
        found.append(mortal.delay_s)
    return found


def test_a_child_that_listens_and_dies_at_once_waits_longer_each_time_up_to_a_bound(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    found = waits(child(tmp_path, f"open({str(socket)!r}, 'w'); raise SystemExit(3)", socket), 8)
    assert found == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, LONGEST_DELAY_S]


def test_a_child_that_is_ready_and_dies_at_once_waits_longer_each_time_until_it_has_lived_for_a_while(tmp_path: Path) -> None:
    program = Program(name="child", argv=[sys.executable, "-c", "input()"], env={}, log=tmp_path / "child.log")
    mortal, settled = Child(program), Child(program, settled_s=0.0)
    for each, expected in ((mortal, [0.1, 0.2, 0.4]), (settled, [0.1, 0.1, 0.1])):
        found = []
        for _ in range(3):
            each.start()
            each.note_ready(True)
            wait_for_death(each)
            found.append(each.delay_s)
        assert found == expected


def test_a_child_remembers_how_its_last_life_ended_with_its_last_words(tmp_path: Path) -> None:
    mortal = child(tmp_path, "print('loading', flush=True); raise SystemExit('no such file')")
    assert mortal.died is None
    mortal.start()
    wait_for_death(mortal)
    assert mortal.died == "exited with status 1: no such file"


def test_who_was_killed_has_no_last_words(tmp_path: Path) -> None:
    mortal = child(tmp_path, "import time; print('at work', flush=True); time.sleep(60)")
    mortal.start()
    wait_until(lambda: mortal.log_tail() == "at work")
    mortal.signal(signal.SIGKILL)
    wait_for_death(mortal)
    assert mortal.died == "was killed by SIGKILL"


def test_a_child_that_was_ready_is_never_hopeless(tmp_path: Path) -> None:
    mortal = child(tmp_path, "raise SystemExit(3)")
    for _ in range(MAX_UNREADY_DEATHS):
        mortal.start()
        mortal.note_ready(True)
        assert wait_for_death(mortal) == 3
    assert not mortal.hopeless


def test_lives_that_were_ready_and_ended_when_nobody_was_answered_any_more_are_no_stillbirths(tmp_path: Path) -> None:
    mortal = child(tmp_path, "raise SystemExit(3)")
    for _ in range(MAX_UNREADY_DEATHS):
        mortal.start()
        mortal.note_ready(True)
        mortal.note_ready(False)
        wait_for_death(mortal)
    assert not mortal.hopeless


def test_a_child_that_never_gets_ready_is_hopeless_in_the_end(tmp_path: Path) -> None:
    mortal = child(tmp_path, "print('no such file'); raise SystemExit(3)")
    for _ in range(MAX_UNREADY_DEATHS):
        assert not mortal.hopeless
        mortal.start()
        wait_for_death(mortal)
    assert mortal.hopeless
    assert mortal.log_tail(2) == "no such file\nno such file"


def test_deaths_of_lives_that_listened_are_no_stillbirths_however_short_they_were(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    mortal = child(tmp_path, f"open({str(socket)!r}, 'w'); raise SystemExit(3)", socket)
    for _ in range(MAX_UNREADY_DEATHS + 1):
        mortal.start()
        wait_for_death(mortal)
    assert not mortal.hopeless
    assert mortal.short_lives == MAX_UNREADY_DEATHS + 1


def test_a_child_that_was_ready_once_and_never_listens_again_is_hopeless_in_the_end(tmp_path: Path) -> None:
    mortal = child(tmp_path, "raise SystemExit(3)", tmp_path / "s")
    mortal.start()
    mortal.note_ready(True)
    wait_for_death(mortal)
    for _ in range(MAX_UNREADY_DEATHS):
        assert not mortal.hopeless
        mortal.start()
        wait_for_death(mortal)
    assert mortal.hopeless


def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    mortal = Child(Program(name="child", argv=[str(tmp_path / "absent")], env={}, log=tmp_path / "child.log"))
    assert not mortal.start_when_due()
    assert mortal.pid is None
    assert mortal.restarts == 0


def test_states_follow_what_is_seen_of_it_and_keep_the_time_they_began(tmp_path: Path) -> None:
    mortal = child(tmp_path, "input()")
    mortal.start()
    mortal.note_ready(False)
    seen = [(mortal.state, mortal.since_us)]
    for look in (True, True, False, True):
        mortal.note_ready(look)
        seen.append((mortal.state, mortal.since_us))
    wait_for_death(mortal)
    seen.append((mortal.state, mortal.since_us))
    mortal.start()
    mortal.note_ready(False)
    wait_for_death(mortal)
    seen.append((mortal.state, mortal.since_us))
    assert [state for state, _ in seen] == ["starting", "ready", "ready", "not ready", "ready", "restarting", "restarting"]
    assert [since for _, since in seen] == sorted(since for _, since in seen)
    assert (seen[1], seen[5]) == (seen[2], seen[6])


def test_a_child_is_put_in_its_place_in_this_life_and_in_those_after_it_and_yields_once_it_is_ready(tmp_path: Path) -> None:
    placement = Placement(frozenset({max(os.sched_getaffinity(0))}), os.getpriority(os.PRIO_PROCESS, 0) + 1)
    starting = placement._replace(niceness=os.getpriority(os.PRIO_PROCESS, 0))
    mortal = child(tmp_path, "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); time.sleep(60)")
    mortal.start()
    wait_until(lambda: len(placements(mortal)) == 2)
    mortal.put(placement)
    assert set(placements(mortal)) == {starting}
    mortal.note_ready(True)
    assert set(placements(mortal)) == {placement}
    mortal.signal(signal.SIGKILL)
    wait_for_death(mortal)
    mortal.start()
    wait_until(lambda: len(placements(mortal)) == 2)
    assert set(placements(mortal)) == {starting}
    mortal.note_ready(True)
    assert set(placements(mortal)) == {placement}
    mortal.signal(signal.SIGKILL)
    wait_for_death(mortal)
    mortal.put(placement)


def placements(running: Child) -> list[Placement]:
    """Of each thread."""
    threads = [int(task.name) for task in Path(f"/proc/{running.pid}/task").iterdir()]
    return [Placement(frozenset(os.sched_getaffinity(thread)), os.getpriority(os.PRIO_PROCESS, thread)) for thread in threads]


TALKER = f"""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("after")))
print("x" * {LOG_FILE_BYTES}, flush=True)
while True:
    signal.pause()
"""


def test_a_long_log_is_moved_aside_while_the_process_writes_on(tmp_path: Path) -> None:
    talker = child(tmp_path, TALKER)
    talker.start()
    wait_until(lambda: talker.program.log.stat().st_size > LOG_FILE_BYTES)
    talker.rotate_log()
    talker.signal(signal.SIGTERM)
    wait_for_death(talker)
    assert talker.program.log.read_text() == "after\n"
    assert (tmp_path / "child.log.1").stat().st_size > LOG_FILE_BYTES


@pytest.mark.parametrize(("status", "words"), [(-9, "was killed by SIGKILL"), (2, "exited with status 2")])
def test_exits_are_told_in_words(status: int, words: str) -> None:
    assert describe_exit(status) == words
