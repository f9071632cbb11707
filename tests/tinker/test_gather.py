import numpy as np

from bloomery.api.routes.tinker.gather import Gathering
from bloomery.services.serving.stopping import StopStrings
from bloomery.types.arrays import Array
from bloomery.types.generation import PromptScored, SampledToken, SampleFinished
from bloomery.types.kept import KeptTokens
from tests.services.serving.test_stopping import TOKENIZER


def token(sample: int, position: int, token: int, top: tuple[tuple[int, float], ...] = ()) -> SampledToken:
    return SampledToken(request_id="r", sample=sample, position=position, token=token, logprob=-float(position), top=top)


def finished(sample: int, reason: str) -> SampleFinished:
    return SampleFinished(request_id="r", sample=sample, reason=reason)


def test_samples_are_complete_when_each_has_ended() -> None:
    gathering = Gathering(2, None, "raw_logprobs")
    for event in (token(1, 0, 7), token(0, 0, 5), token(0, 1, 6), finished(0, "length")):
        assert gathering.take(event) is None
    assert not gathering.complete
    gathering.take(finished(1, "stop"))
    assert gathering.complete
    assert [(out.tokens, out.logprobs, out.hit_limit) for out in gathering.samples()] == [([5, 6], [0.0, -1.0], True), ([7], [0.0], False)]


def test_a_stop_string_ends_its_sample_and_no_other() -> None:
    first, second, late = TOKENIZER.encode("xy"), TOKENIZER.encode("ab"), 1
    gathering = Gathering(2, lambda: StopStrings(TOKENIZER, ["xy"]), "raw_logprobs")
    assert gathering.take(token(0, 0, first[0])) is None
    assert gathering.take(token(0, 1, first[1])) == 0
    assert gathering.take(token(0, 2, late)) is None
    assert gathering.take(token(1, 0, second[0])) is None
    assert not gathering.complete
    gathering.take(finished(0, "abort"))
    gathering.take(finished(1, "length"))
    assert [(out.tokens, out.hit_limit) for out in gathering.samples()] == [(first, False), ([second[0]], True)]


def test_kept_tokens_count_as_each_of_them_would_up_to_a_stop_string() -> None:
    said = TOKENIZER.encode("xyab")
    kept = KeptTokens(request_id="r", sample=0, position=0, tokens=tuple(said), logprobs=tuple(-float(place) for place in range(len(said))))
    for watch, stopped, most in ((None, None, len(said)), (lambda: StopStrings(TOKENIZER, ["xy"]), 0, len(TOKENIZER.encode("xy")))):
        gathering = Gathering(1, watch, "processed_logprobs")
        assert gathering.take(kept) == stopped
        assert gathering.kept() == (most,)
        gathering.take(finished(0, "length"))
        assert gathering.take(kept) is None
        assert [(out.tokens, out.logprobs) for out in gathering.samples()] == [(said[:most], list(kept.logprobs[:most]))]


def test_what_was_asked_about_the_prompt_is_kept() -> None:
    gathering = Gathering(1, None, "raw_logprobs")
    assert gathering.scored is None
    scored = PromptScored(request_id="r", logprobs=Array.of(np.array([np.nan, -1, -2], np.float32)))
    assert gathering.take(scored) is None
    assert gathering.scored is scored
