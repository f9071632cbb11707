"""Kept tokens in one event: what is put together comes apart as it was, and nothing that says more is put together."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bloomery.types.generation import SampledToken, SampleFinished, SamplerEvent
from bloomery.types.kept import KeptTokens, apart, together


def token(position: int, *, sample: int = 0, kept: bool = True, **said: Any) -> SampledToken:
    return SampledToken(request_id="r", sample=sample, position=position, token=7 + position, logprob=-position / 3, kept=kept, **said)


tokens = st.builds(
    token,
    st.integers(0, 3),
    sample=st.integers(0, 1),
    kept=st.booleans(),
    top=st.sampled_from([(), ((1, -0.5),)]),
    version=st.sampled_from([None, None, "v"]),
    processed_logprob=st.sampled_from([None, None, -1.5]),
)
ends = st.just(SampleFinished(request_id="r", sample=0, reason="length"))


@given(st.lists(tokens | ends, max_size=12))
def test_what_is_put_together_comes_apart_as_it_was(events: list[SamplerEvent]) -> None:
    assert [each for told in together(events) for each in apart(told)] == events


def test_tokens_that_were_kept_one_behind_the_other_are_one_event() -> None:
    run, behind = [token(0, version="v"), token(1), token(2)], token(3, kept=False)
    told = together([*run, behind, SampleFinished(request_id="r", sample=0, reason="length")])
    joined = KeptTokens(request_id="r", sample=0, position=0, tokens=(7, 8, 9), logprobs=(0.0, -1 / 3, -2 / 3), version="v")
    assert told == (joined, behind, SampleFinished(request_id="r", sample=0, reason="length"))


def test_what_does_not_follow_or_is_of_other_weights_begins_another_event() -> None:
    events = [token(0), token(1), token(1, sample=1), token(2, sample=1, version="v"), token(4, sample=1)]
    assert [(each.sample, each.position, each.tokens) for each in together(events) if isinstance(each, KeptTokens)] == [
        (0, 0, (7, 8)),
        (1, 1, (8,)),
        (1, 2, (9,)),
        (1, 4, (11,)),
    ]
