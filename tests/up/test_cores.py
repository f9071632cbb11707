"""How processors are divided between what is trained and what is served."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.obs.machine import usable_cpus
from bloomery.up.cores import Placement, Shares, announce, divide, share, warn

YIELDING = Placement(niceness=5)


@pytest.mark.parametrize(
    ("processors", "replicas", "from_start", "threads", "expected"),
    [
        (1, 1, True, None, Shares(1, 1, YIELDING)),
        (2, 0, True, None, Shares(2, 1)),
        # A laptop trains with both of its processors, and what is served there goes first.
        (2, 1, False, None, Shares(2, 1, YIELDING)),
        (2, 1, True, None, Shares(1, 1, YIELDING)),
        (2, 2, True, 1, Shares(1, 1, YIELDING)),
        (8, 1, False, None, Shares(6, 2, Placement(frozenset(range(6))), Placement(frozenset({6, 7})))),
        (8, 2, True, None, Shares(6, 1, Placement(frozenset(range(6))), Placement(frozenset({6, 7})))),
        (16, 1, True, 1, Shares(1, 1, Placement(frozenset(range(12))), Placement(frozenset(range(12, 16))))),
    ],
)
def test_processors_are_divided(processors: int, replicas: int, from_start: bool, threads: int | None, expected: Shares) -> None:
    assert divide(list(range(processors)), processors, replicas=replicas, from_start=from_start, threads=threads) == expected


@given(processors=st.integers(1, 200), replicas=st.integers(0, 100), from_start=st.booleans(), threads=st.none() | st.integers(1, 64))
def test_an_engine_shares_no_processor_with_replicas_or_yields_to_them(processors: int, replicas: int, from_start: bool, threads: int | None) -> None:
    shares = divide(list(range(processors)), processors, replicas=replicas, from_start=from_start, threads=threads)
    assert shares.threads >= 1
    assert shares.replica_threads >= 1
    assert (shares.engine.cores is None) == (shares.replica.cores is None) == (replicas == 0 or processors < 4)
    assert (shares.engine == YIELDING) == (replicas > 0 and processors < 4)
    assert shares.replica.niceness == 0
    if shares.engine.cores is not None and shares.replica.cores is not None:
        assert shares.engine.cores
        assert shares.replica.cores
        assert shares.engine.cores | shares.replica.cores == set(range(processors))
        assert not shares.engine.cores & shares.replica.cores


@pytest.mark.parametrize(
    ("processors", "replicas", "rollouts", "threads", "expected"),
    [
        # Two processors: one trains, one samples.
        (2, 0, 1, None, Shares(1, 1)),
        (2, 0, 3, None, Shares(1, 1)),
        (2, 0, 1, 2, Shares(2, 1)),
        (8, 0, 1, None, Shares(4, 1)),
        (8, 1, 1, None, Shares(3, 2, Placement(frozenset(range(6))), Placement(frozenset({6, 7})))),
        (16, 0, 3, None, Shares(4, 1)),
    ],
)
def test_replicas_for_rollouts_have_as_many_threads_as_the_engine_whose_part_they_share(
    processors: int, replicas: int, rollouts: int, threads: int | None, expected: Shares
) -> None:
    shares = divide(list(range(processors)), processors, replicas=replicas, from_start=True, threads=threads, rollouts=rollouts)
    assert (shares.threads, shares.engine, shares.replica) == (expected.threads, expected.engine, expected.replica)


def test_nobody_is_pinned_under_a_quota_that_is_smaller_than_the_machine() -> None:
    shares = divide(list(range(64)), 4, replicas=1, from_start=False, threads=None)
    assert shares == Shares(3, 1, YIELDING)


def test_this_machine_is_divided_too() -> None:
    shares = share(engines=1, replicas=1, from_start=True, threads=None)
    assert 1 <= shares.threads <= usable_cpus()
    assert shares.engine.cores is None or shares.engine.cores < os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("shares", "replicas", "from_start", "rollouts", "line"),
    [
        (Shares(2, 1), 0, True, 0, "the engine computes with 2 threads and serves what is deployed (--replicas 0)"),
        (
            Shares(1, 1, YIELDING),
            1,
            True,
            0,
            "the engine computes with 1 thread; 1 replica with 1 thread will serve, on any processor, and the engine then yields to it",
        ),
        (
            Shares(6, 1, Placement(frozenset(range(6))), Placement(frozenset({6, 7}))),
            2,
            False,
            0,
            "the engine computes with 6 threads; 2 replicas with 1 thread each will serve, started when something is deployed or the model is "
            "asked, on processors 6, 7, and the engine then keeps to processors 0, 1, 2, 3, 4, 5",
        ),
        (
            Shares(1, 1),
            0,
            True,
            1,
            "the engine computes with 1 thread, and so does 1 replica for rollouts; the engine serves what is deployed (--replicas 0)",
        ),
        (
            Shares(1, 1, YIELDING),
            1,
            False,
            2,
            "the engine computes with 1 thread, and so do 2 replicas for rollouts; 1 replica with 1 thread will serve, started when something is "
            "deployed or the model is asked, on any processor, and they then yield to it",
        ),
    ],
)
def test_what_was_decided_is_said(shares: Shares, replicas: int, from_start: bool, rollouts: int, line: str) -> None:
    assert announce(shares, replicas, from_start=from_start, rollouts=rollouts) == line


def test_more_threads_than_processors_are_warned_of() -> None:
    assert (warn(None, 2), warn(2, 2)) == (None, None)
    slower = "threads that wait for each other make it slower, leave the option out"
    assert warn(64, 2) == f"warning: --threads 64 on 2 usable processors: {slower}"
    assert warn(2, 1) == f"warning: --threads 2 on 1 usable processor: {slower}"
