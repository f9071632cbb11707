"""What a step tells of its failures, and when a loop from which nothing comes back stops."""

import pytest

from bloomery.recipes.failures import MAX_MESSAGE, MAX_REASONS, Losses, NothingCameBack, Reason, reasons
from bloomery.recipes.rewards import FailureKind
from bloomery.recipes.rollouts import Failure, Group, Problem
from bloomery.types.errors import Unavailable


def group(*failures: tuple[FailureKind, str]) -> Group:
    return Group(0, Problem("p", (1,)), (), tuple(Failure(f"0.{place}", *failure, final=True) for place, failure in enumerate(failures)))


def test_one_cause_is_one_reason_however_often_it_comes_and_whatever_numbers_it_names() -> None:
    first = group(("raised", "OSError: port 7001 is busy"), ("timeout", "no answer within 30 s"))
    second = group(("raised", "OSError: port 7002 is busy"), ("raised", "ValueError: no"), ("sampling", "OSError: port 7001 is busy"))
    assert reasons([first, second]) == (
        Reason("raised", "OSError: port 7001 is busy", 2),
        Reason("timeout", "no answer within 30 s", 1),
        Reason("sampling", "OSError: port 7001 is busy", 1),
        Reason("raised", "ValueError: no", 1),
    )
    assert reasons([group()]) == ()


def test_thousands_of_different_errors_are_few_reasons_and_hide_no_kind() -> None:
    words = [f"{chr(97 + place % 26)}{chr(97 + place // 26 % 26)}" for place in range(500)]
    found = reasons([group(*(("raised", f"KeyError: {word} {'long ' * 1000}") for word in words), ("no_tokens", "it asked for nothing"))])
    assert len(found) == MAX_REASONS
    assert found[1] == Reason("no_tokens", "it asked for nothing", 1)
    assert max(len(reason.message) for reason in found) == MAX_MESSAGE + len("...")


def test_what_foreign_code_says_in_halves_of_characters_is_told_as_text() -> None:
    (found,) = reasons([group(("raised", "RolloutFailed: status 13: done \ud83d"))])
    assert found.message == "RolloutFailed: status 13: done ?"


def test_rounds_without_anything_to_compare_are_counted_in_a_row() -> None:
    lost = (Reason("raised", "OSError: the judge is away", 9), Reason("timeout", "no answer within 30 s", 2))
    losses = Losses(2)
    losses.note(0, lost)
    losses.note(1, lost)
    losses.note(0, lost)
    with pytest.raises(Unavailable) as stopped:
        losses.note(0, lost)
    told = stopped.value.message
    assert told.startswith("2 rounds in a row left nothing to train on")
    assert "9 times `raised` (OSError: the judge is away); 2 times `timeout` (no answer within 30 s)" in told
    assert "mend the grader or the agent, which raised this; mend the grader or the agent, or raise its time (`grade_timeout_s`" in told
    assert "or raise `max_lost_rounds`" in told


def test_the_last_round_of_a_loop_that_has_learnt_nothing_is_not_lost_quietly() -> None:
    lost = (Reason("raised", "OSError: the judge is away", 9),)
    losses = Losses(3)
    losses.end(1, lost)
    losses.note(0, lost)
    with pytest.raises(NothingCameBack, match="2 rounds in a row left nothing to train on") as stopped:
        losses.end(0, lost)
    assert "9 times `raised` (OSError: the judge is away)" in stopped.value.why
    assert "made again when the loop is started again" in stopped.value.message
    assert "max_lost_rounds" not in stopped.value.message
