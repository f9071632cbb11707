"""What hangs is given up by name, and what goes on is waited for."""

import threading
import time

import pytest

from bloomery.store import patience
from bloomery.store.patience import Patience, went_on
from bloomery.types.errors import NotFound, Unavailable


def test_what_comes_of_a_call_is_its_answer_or_its_error() -> None:
    waiting = Patience(30.0)
    assert waiting.within(lambda: waiting.within(lambda: 3, "inner") + 1, "outer") == 4
    with pytest.raises(NotFound, match="nothing there"):
        waiting.within(lambda: _refuse(), "it")
    with pytest.raises(TimeoutError, match="the system's own"):
        waiting.within(lambda: _time_out(), "it")


def test_a_call_that_goes_on_may_take_as_long_as_it_likes() -> None:
    idle_s = 1.0

    def busy() -> str:
        until = time.monotonic() + 2 * idle_s
        while time.monotonic() < until:
            went_on()
        return "done"

    assert Patience(idle_s).within(busy, "it") == "done"


def test_calls_that_hang_are_left_alone_and_no_more_of_them_than_can_be_afforded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_MOST_LEFT", 2)
    waiting, over = Patience(0.05), threading.Event()
    for _ in range(2):
        with pytest.raises(Unavailable, match="mount `a`: nothing happened for"):
            waiting.within(over.wait, "mount `a`")
    with pytest.raises(Unavailable, match="mount `a`: 2 calls before it were not answered"):
        waiting.within(over.wait, "mount `a`")
    over.set()
    assert Patience(30.0).within(lambda: 1, "it") == 1


def _refuse() -> None:
    raise NotFound("nothing there")


def _time_out() -> None:
    raise TimeoutError("the system's own")
