from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.api.routes.tinker.names import (
    Creation,
    LossCreation,
    OperationFuture,
    SampleFuture,
    Unloading,
    model_name,
    parse_future,
    session_of,
)
from bloomery.types.errors import InvalidInput, NotFound

IDS = st.text(alphabet="abc0123:-", min_size=1, max_size=20)
SEQS = st.integers(0, 2**63)
FUTURES: dict[str, st.SearchStrategy[Any]] = {
    "create|": st.builds(Creation, IDS),
    "unload|": st.builds(Unloading, IDS),
    "loss|": st.builds(LossCreation, IDS),
    "sample|": st.builds(SampleFuture, IDS, SEQS),
    "operation|": st.builds(OperationFuture, IDS, SEQS, st.text(max_size=20)),
}
"""Every kind of future, by how its names begin."""


@given(futures=st.tuples(*FUTURES.values()))
def test_a_futures_name_says_everything_about_it(futures: tuple[Any, ...]) -> None:
    assert {type(future) for future in futures} == set(get_args(get_type_hints(parse_future)["return"]))
    for begins, future in zip(FUTURES, futures, strict=True):
        accepted = future.accepted(1) if isinstance(future, SampleFuture) else future.accepted()
        name = accepted["request_id"]
        found = parse_future(name)
        # Futures of different kinds are equal where their fields are.
        assert (name.startswith(begins), type(found), found) == (True, type(future), future)


@pytest.mark.parametrize("kind", ["sample", "operation"])
def test_a_number_without_end_is_no_number(kind: str) -> None:
    with pytest.raises(NotFound):
        parse_future(f"{kind}|x|{'9' * 5000}" + ("|" if kind == "operation" else ""))


@given(st.text(max_size=30).filter(lambda name: not name.startswith(tuple(FUTURES))))
def test_a_name_of_something_else_is_not_found(name: str) -> None:
    with pytest.raises(NotFound):
        parse_future(name)


def test_a_save_says_what_it_is_for() -> None:
    save = OperationFuture("session-1:train:0", 3)
    assert [(future.sampler, future.inflight, future.export) for future in (save.for_sampler(7), save.for_sampler(8, inflight=True))] == [
        (7, False, None),
        (8, True, None),
    ]
    assert save.exporting("kept").export == "kept"
    for other in ("sampler-7", "sampler:x", "sampler:", f"sampler:{10**18}", "tinker://a:train:0/weights/x"):
        named = save.named(other)
        assert (named.sampler, named.inflight, named.export) == (None, False, None)


def test_only_runs_of_sessions_have_one() -> None:
    assert session_of(model_name("session-1", 2)) == "session-1"
    with pytest.raises(InvalidInput, match="no session"):
        session_of("run-1")
