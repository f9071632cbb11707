"""The routing of samples, and its weights: put together token by token, kept within bounds, and told to its project alone."""

import httpx
import numpy as np
import pytest
import tinker

from bloomery.api.routes.tinker.gather import Gathering
from bloomery.api.routes.tinker.names import SampleFuture
from bloomery.api.routes.tinker.routed import KeptRouting, Rows, SampleRouting
from bloomery.services.serving.stopping import StopStrings
from bloomery.types.arrays import Array
from bloomery.types.errors import Gone, NotFound
from bloomery.types.generation import PromptRouted, SampledToken
from tests.sdk import connected
from tests.services.serving.test_stopping import TOKENIZER
from tests.tinker.over_fake_engine import KEY, Served
from tests.tinker.samples import ask, sampler_of

SAMPLE = SampleFuture("session:sampler:0", 7)
ME = "mine"


def token(position: int, experts: int, *, token: int = 5, sample: int = 0) -> SampledToken:
    fed = Array.of(np.array([[experts, experts + 1]], np.int32))
    weights = Array.of(np.array([[experts / 8, experts / 7]], np.float32))
    return SampledToken(request_id="r", sample=sample, position=position, token=token, logprob=-1.0, fed_experts=fed, fed_expert_weights=weights)


def routed(prompt: int, *samples: int, weights: bool = False) -> SampleRouting:
    """Of a prompt and samples of so many tokens."""
    experts = Rows(np.ones((prompt - 1, 1, 2), np.int16), tuple(np.full((tokens, 1, 2), tokens, np.int16) for tokens in samples))
    told = Rows(np.ones((prompt - 1, 1, 2), np.float32), tuple(np.full((tokens, 1, 2), tokens / 7, np.float32) for tokens in samples))
    return SampleRouting(experts, told if weights else None)


def test_a_sequence_has_a_row_for_every_token_and_its_last_is_free() -> None:
    gathering = Gathering(2, None, "raw_logprobs")
    experts, weights = np.array([[[9, 8]], [[7, 6]]], np.int32), np.array([[[0.9, 0.8]], [[0.7, 0.6]]], np.float32)
    gathering.take(PromptRouted(request_id="r", experts=Array.of(experts), expert_weights=Array.of(weights)))
    for event in (token(0, 1), token(0, 3, sample=1), token(1, 2)):
        gathering.take(event)
    routing = SampleRouting.of(gathering)
    assert routing is not None
    assert routing.experts.of_sequence(0, -1)[:, 0].tolist() == [[9, 8], [7, 6], [1, 2], [2, 3], [-1, -1]]
    assert routing.experts.of_sequence(1, -1)[:, 0].tolist() == [[9, 8], [7, 6], [3, 4], [-1, -1]]
    assert routing.weights is not None
    told = routing.weights.of_sequence(0, 0)
    assert told.dtype == np.float32
    assert told[:, 0].tolist() == np.float32([[0.9, 0.8], [0.7, 0.6], [1 / 8, 1 / 7], [2 / 8, 2 / 7], [0, 0]]).tolist()


def test_of_a_sample_that_was_not_asked_there_is_nothing_to_keep() -> None:
    gathering = Gathering(1, None, "raw_logprobs")
    assert SampleRouting.of(gathering) is None
    gathering.take(PromptRouted(request_id="r", experts=Array.of(np.zeros((2, 1, 2), np.int32))))
    routing = SampleRouting.of(gathering)
    assert routing is not None
    assert routing.weights is None


def test_a_sample_that_a_stop_string_ended_has_rows_for_its_tokens_alone() -> None:
    spelled = TOKENIZER.encode("xy")
    gathering = Gathering(1, lambda: StopStrings(TOKENIZER, ["xy"]), "raw_logprobs")
    for position, each in enumerate([*spelled, 1]):
        gathering.take(token(position, position, token=each))
    assert gathering.samples()[0].tokens == spelled
    assert [experts.numpy()[0, 0] for experts in gathering.fed_experts()[0]] == list(range(len(spelled)))
    assert len(gathering.fed_expert_weights()[0]) == len(spelled)


def test_it_is_found_by_the_id_of_a_sequence_of_its_project() -> None:
    kept = KeptRouting()
    kept.keep(SAMPLE, ME, routed(3, 4, 5))
    (first, second) = SAMPLE.accepted(2)["sample_sequence_ids"]
    assert kept.experts(first, ME).shape == (7, 1, 2)
    assert kept.experts(second, ME)[2:, 0, 0].tolist() == [5] * 5 + [-1]
    for find in (kept.experts, kept.weights):
        for stranger in (first[:-1] + "2", "nonsense", f"a:{'9' * 5000}:0"):
            with pytest.raises(NotFound):
                find(stranger, ME)
        for name, owner in ((first, "theirs"), ("session:sampler:0:8:0", ME)):
            with pytest.raises(Gone, match="x-bloomery-routing"):
                find(name, owner)


def test_weights_are_found_where_they_were_asked_for() -> None:
    kept = KeptRouting()
    (first,) = SAMPLE.accepted(1)["sample_sequence_ids"]
    kept.keep(SAMPLE, ME, routed(3, 4))
    with pytest.raises(Gone, match="send `x-bloomery-routing-weights: true`"):
        kept.weights(first, ME)
    kept.keep(SAMPLE, ME, routed(3, 4, weights=True))
    assert kept.weights(first, ME)[:, 0, 0].tolist() == np.float32([1, 1, *[4 / 7] * 4, 0]).tolist()
    assert routed(3, 4, weights=True).nbytes == 3 * routed(3, 4).nbytes, "two bytes of an expert, four of its weight"


def test_the_oldest_goes_first_and_the_newest_stays_whatever_its_size() -> None:
    size = routed(11, 10).nbytes
    kept = KeptRouting(max_kept=3, max_kept_bytes=2 * size)
    futures = [SampleFuture("s", seq) for seq in range(4)]

    def found() -> list[int]:
        return [future.seq for future in futures if _has(kept, future)]

    for future in futures[:3]:
        kept.keep(future, ME, routed(11, 10))
    assert found() == [1, 2]
    kept.keep(futures[1], ME, routed(11, 10))
    kept.keep(futures[3], ME, routed(11, 10))
    assert found() == [1, 3]
    kept.keep(futures[0], ME, routed(500, 10))
    assert found() == [0]
    few = KeptRouting(max_kept=1)
    few.keep(futures[0], ME, routed(2, 1))
    few.keep(futures[1], ME, routed(2, 1))
    assert [_has(few, future) for future in futures[:2]] == [False, True]


def _has(kept: KeptRouting, future: SampleFuture) -> bool:
    try:
        kept.experts(f"{future.sampling_session_id}:{future.seq}:0", ME)
    except Gone:
        return False
    return True


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-routing", refused="for a dense model")
def test_a_dense_model_is_refused_by_the_headers_name(server: Served) -> None:
    with connected(server, headers={"x-bloomery-routing": "true"}) as client, pytest.raises(tinker.BadRequestError, match="no experts") as refused:
        ask(sampler_of(client)).result()
    assert refused.value.body["field"] == "x-bloomery-routing"


@pytest.mark.contract("POST /api/v1/asample", "x-bloomery-routing-weights", refused="without experts")
def test_weights_of_a_model_without_experts_are_refused_by_the_headers_name(server: Served) -> None:
    headers = {"x-bloomery-routing-weights": "true"}
    with connected(server, headers=headers) as client, pytest.raises(tinker.BadRequestError, match="no experts, leave it out") as refused:
        ask(sampler_of(client)).result()
    assert refused.value.body["field"] == "x-bloomery-routing-weights"


def test_a_sample_that_was_not_asked_for_it_has_none(server: Served) -> None:
    with connected(server) as client:
        sequence_id = ask(sampler_of(client)).result().sequences[0].sequence_id
    for path in ("routing", "routing/weights"):
        answer = httpx.get(f"{server.url}/api/v1/samples/{sequence_id}/{path}", headers={"x-api-key": KEY})
        assert (answer.status_code, answer.json()["code"]) == (410, "gone")
        assert httpx.get(f"{server.url}/api/v1/samples/{sequence_id}/{path}").status_code == 401
