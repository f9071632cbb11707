import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.api.routes.tinker.names import Creation, OperationFuture, SampleFuture, Unloading, model_name, parse_future, session_of
from bloomery.types.errors import InvalidInput, NotFound

IDS = st.text(alphabet="abc0123:-", min_size=1, max_size=20)


@given(model_id=IDS, seq=st.integers(0, 2**63), about=st.text(max_size=20))
def test_a_futures_name_says_everything_about_it(model_id: str, seq: int, about: str) -> None:
    futures = [Creation(model_id), Unloading(model_id), OperationFuture(model_id, seq, about)]
    assert [parse_future(future.accepted()["request_id"]) for future in futures] == futures
    assert parse_future(SampleFuture(model_id, seq).request_id) == SampleFuture(model_id, seq)


@given(st.text(max_size=30))
def test_a_name_of_something_else_is_not_found(name: str) -> None:
    if name.startswith(("create|", "unload|", "sample|", "operation|")):
        return
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
