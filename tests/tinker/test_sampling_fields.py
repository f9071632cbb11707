"""Every field of a sample, copies of samplers, polls for many samples, and more samples than there is room for: with the unmodified SDK."""

import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from openai import OpenAI
from tinker import types

from bloomery.api.routes.tinker.names import SEQS_OF_A_CLONE
from bloomery.types.errors import NotFound
from tests.live import wait_until
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served
from tests.tinker.samples import ENDLESS, FIRST_SAMPLED, ME, ask, sampler_of, span_of

# What is asked and answered


@pytest.mark.contract(
    "POST /api/v1/asample",
    "num_samples",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "target_prompt_logprobs.data",
    "target_prompt_logprobs.dtype",
    "target_prompt_logprobs.shape",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)
def test_everything_that_is_asked_about_a_prompt_comes_back_where_it_belongs(server: Served, service: tinker.ServiceClient) -> None:
    ids = torch.tensor([[-1, 12], [24, -1]])
    answer = sampler_of(service).sample(
        types.ModelInput.from_ints([1, 2, 3]),
        2,
        types.SamplingParams(max_tokens=1, seed=7),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(ids),
        prompt_alt_tokens_k=3,
        prompt_logprobs_last_n=1,
    )
    found = answer.result()
    assert found.prompt_logprobs == [None, None, 0.0]
    assert found.topk_prompt_logprobs == [None, None, [(2, -2.0), (3, -3.0)]]
    assert found.target_prompt_logprobs is not None
    assert found.target_prompt_logprobs.tolist() == [[0.0, -12.0], [-12.0, 0.0]]
    assert found.prompt_alt_tokens is not None
    assert found.prompt_alt_tokens.tokens.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert found.prompt_alt_tokens.logprobs.tolist() == [[-1.0, -2.0, -3.0], [-2.0, -3.0, -4.0]]
    assert found.prompt_cache_hit_tokens == 0
    asked = server.engine.sampled[-1]
    assert (asked.prompt_logprobs, asked.prompt_top_k, asked.scored_from, asked.prompt_draws, asked.top_logprobs) == (True, 2, 2, 3, 0)


@pytest.mark.contract("POST /api/v1/asample", "target_prompt_logprobs.sparse_crow_indices", "target_prompt_logprobs.sparse_col_indices")
def test_sparse_targets_come_back_sparse(service: tinker.ServiceClient) -> None:
    ids = torch.full((7, 8), -1)
    ids[4, 5] = 10
    answer = sampler_of(service).sample(
        types.ModelInput.from_ints(list(range(1, 9))),
        1,
        types.SamplingParams(max_tokens=1),
        target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
    )
    found = answer.result().target_prompt_logprobs
    assert found is not None
    assert (found.shape, list(found.data), found.sparse_col_indices) == ([7, 8], [-2.0], [5])
    assert found.to_torch()[4, 5] == -2.0


def test_prompt_tokens_that_the_engine_had_are_recorded(tmp_path: Path) -> None:
    with served(tmp_path, record="metadata") as server:
        server.engine.found_tokens = 2
        with connected(server) as client:
            ask(sampler_of(client), (1, 2, 3)).result()
        with OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=KEY) as sdk:
            sdk.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
        server.do(server.services.traffic.flush)
        with closing(sqlite3.connect(tmp_path / "bloomery.db")) as database:
            assert database.execute("select kind, cached_tokens from span order by kind").fetchall() == [("completion", 2), ("sample", 2)]


def test_prompt_tokens_that_the_engine_had_are_told(server: Served, service: tinker.ServiceClient) -> None:
    server.engine.found_tokens = 2
    try:
        assert ask(sampler_of(service), (1, 2, 3)).result().prompt_cache_hit_tokens == 2
    finally:
        server.engine.found_tokens = 0


@pytest.mark.parametrize(("seed", "noise"), [(0, 0), (-1, -1), ((1 << 64) - 1, -1), (1 << 63, -(1 << 63)), ((1 << 63) - 1, (1 << 63) - 1)])
@pytest.mark.contract("POST /api/v1/asample", "sampling_params.seed")
def test_a_seed_is_any_number_of_64_bits(server: Served, service: tinker.ServiceClient, seed: int, noise: int) -> None:
    answer = ask(sampler_of(service), seed=seed).result()
    assert server.engine.sampled[-1].params.seed == noise
    assert span_of(server, answer)["span"]["seed"] == noise


@pytest.mark.contract("POST /api/v1/asample", "prompt.chunks.type", "prompt.chunks.tokens")
def test_a_prompt_in_many_pieces_is_one_prompt(server: Served, service: tinker.ServiceClient) -> None:
    tokens = list(range(1, 31))
    pieces = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens[at : at + 2]) for at in range(0, 30, 2)])
    sampler_of(service).sample(pieces.append(types.EncodedTextChunk(tokens=[])), 1, types.SamplingParams(max_tokens=1)).result()
    assert server.engine.sampled[-1].prompt.numpy().tolist() == tokens


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        (types.ImageChunk(data=b"png", format="png"), "image"),
        (types.ImageAssetPointerChunk(location="there", format="png", expected_tokens=4), "image_asset_pointer"),
        (types.DmelChunk(dmel=b"sound"), "dmel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.contract("POST /api/v1/asample", "prompt.chunks.type", refused="any other than encoded_text: images and sound")
def test_pictures_and_sounds_are_refused_by_name(service: tinker.ServiceClient, chunk: Any, kind: str) -> None:
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), chunk])
    with pytest.raises(tinker.BadRequestError, match=f"chunk of type `{kind}`"):
        sampler_of(service).sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"topk_prompt_logprobs": 301}, "`topk_prompt_logprobs` is 301"),
        ({"topk_prompt_logprobs": -1}, "`topk_prompt_logprobs` is -1"),
        ({"topk_sample_logprobs": 301}, "`topk_sample_logprobs` is 301"),
        ({"prompt_alt_tokens_k": 1 << 23}, "`prompt_alt_tokens_k` asks for"),
        ({"target_prompt_logprobs": types.TensorData(data=[300], dtype="int64", shape=[1, 1])}, "`target_prompt_logprobs` holds token id 300"),
        ({"target_prompt_logprobs": types.TensorData(data=[3, 4], dtype="int64", shape=[2, 1])}, r"`target_prompt_logprobs` is int64\[2, 1\]"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "between 1 and 1"),
    ],
)
def test_what_cannot_be_asked_of_a_prompt_is_refused_by_name(service: tinker.ServiceClient, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=field):
        sampler_of(service).sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1), **asked).result()


@pytest.mark.contract("POST /api/v1/asample", "record_stability_info", ignored="what stable_reinforce needs of a sample is in the datum")
def test_stability_information_is_accepted_and_every_sequence_has_its_name(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL, record_stability_info=True).result()
    answer = ask(sampler, samples=3).result()
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 3
    assert [(len(sequence.tokens), len(sequence.logprobs or ())) for sequence in answer.sequences] == [(2, 2)] * 3


# Several clients of one sampler, and one poll for all samples


def polling(client: tinker.ServiceClient) -> tinker.SamplingClient:
    """A sampler that is told which of its samples ended, as the server may have clients do."""
    holder = client.holder
    holder._client_config = holder._client_config.model_copy(update={"sample_use_retrieve_futures": True})
    return sampler_of(client)


@pytest.mark.contract("POST /api/v1/retrieve_futures", "prev_cursor", "retrieved_request_ids")
def test_a_client_is_told_in_one_poll_which_samples_ended(server: Served) -> None:
    with connected(server) as client:
        sampler = polling(client)
        answers = [ask(sampler, (1, n % 50), seed=n) for n in range(60)]
        failing = ask(sampler, ENDLESS, max_tokens=3)
        sequences = [answer.result(timeout=60).sequences[0] for answer in answers]
        assert [sequence.tokens for sequence in sequences] == [[FIRST_SAMPLED, FIRST_SAMPLED + 1]] * 60
        endless = next(request for request in reversed(server.engine.sampled) if tuple(request.prompt.numpy()) == ENDLESS)
        server.loop.call_soon_threadsafe(server.engine.fail, endless, "the weights melted")
        with pytest.raises(tinker.RequestFailedError, match="melted"):
            failing.result(timeout=120)
        # What the client has is not kept.
        sampler_id = str(sequences[0].sequence_id).removesuffix(":0:0")
        assert [sequence.sequence_id for sequence in sequences] == [f"{sampler_id}:{number}:0" for number in range(60)]
        wait_until(lambda: {retrieved(server, f"sample|{sampler_id}|{number}") for number in range(61)} == {410})


def retrieved(server: Served, request_id: str) -> int:
    """The status of the answer to who asks for a result."""
    return httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers={"x-api-key": KEY}).status_code


@pytest.mark.contract("POST /api/v1/join_sampling_session", "sampling_session_id")
def test_copies_of_a_sampler_have_numbers_of_their_own(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    for number, each in enumerate((sampler, *copies)):
        for seq in range(2):
            (sequence,) = ask(each).result().sequences
            assert sequence.sequence_id == f"{sampler._sampling_session_id}:{number * SEQS_OF_A_CLONE + seq}:0"
    numbers = [server.do(lambda: server.services.sessions.join_sampling(ME, sampler._sampling_session_id)) for _ in range(2)]
    assert numbers == [3, 4]
    with pytest.raises(NotFound):
        server.do(lambda: server.services.sessions.join_sampling(ME._replace(project="other"), sampler._sampling_session_id))


@pytest.mark.contract("POST /api/v1/retrieve_futures", "target.type", "target.sampling_session_id", "timeout")
def test_ends_are_told_to_whoever_has_the_sampler_alone(server: Served, service: tinker.ServiceClient) -> None:
    sampler = sampler_of(service)
    key = server.do(lambda: server.services.auth.create(ME, "other", frozenset({"infer"}), project="elsewhere")).key
    body = {"target": {"type": "sampling_session", "sampling_session_id": sampler._sampling_session_id, "cloned_sampler_id": 0}, "timeout": 0}
    answer = httpx.post(f"{server.url}/api/v1/retrieve_futures", json=body, headers={"x-api-key": key})
    assert answer.status_code == 404
    mine = httpx.post(f"{server.url}/api/v1/retrieve_futures", json=body, headers={"x-api-key": KEY})
    assert (mine.status_code, mine.json()) == (200, {"completions": [], "cursor": 0})
    lost = httpx.post(f"{server.url}/api/v1/retrieve_futures", json=body | {"timeout": None}, headers={"x-api-key": KEY})
    assert lost.status_code == 410


# More than there is room for


def test_a_client_is_advised_to_have_fewer_samples_under_way_than_a_process_may_have_files_open(service: tinker.ServiceClient) -> None:
    assert sampler_of(service).retry_handler.config.max_connections == 256


def many(directory: Path, *, samples: int, room: int) -> None:
    with served(directory, record="off", most_samples=room) as server, connected(server) as client:
        # More at a time than the server advises.
        client.holder._client_config = client.holder._client_config.model_copy(update={"sample_max_concurrent_requests": samples})
        sampler = sampler_of(client)
        # Those that have no end keep all the room until others were turned away: an engine of a test may be as quick as whoever asks.
        filling = [ask(sampler, ENDLESS, max_tokens=3, seed=samples + n) for n in range(room)]
        wait_until(lambda: len(server.engine.sampled) == room)
        answers = [ask(sampler, (1, n % 50), seed=n) for n in range(samples)]
        wait_until(lambda: server.futures.turned_away > 0)
        for request in list(server.engine.sampled):
            server.loop.call_soon_threadsafe(server.engine.fail, request, "room for others")
        for answer in answers:
            assert answer.result(timeout=500).sequences[0].tokens == [FIRST_SAMPLED, FIRST_SAMPLED + 1]
        for each in filling:
            with pytest.raises(tinker.RequestFailedError, match="room for others"):
                each.result(timeout=60)
        seeds = sorted(request.params.seed for request in server.engine.sampled[room:])
        assert seeds == list(range(samples)), "each was sampled once"


@pytest.mark.slow
def test_samples_that_find_no_room_come_again_until_they_do(tmp_path: Path) -> None:
    many(tmp_path, samples=60, room=4)


@pytest.mark.slow
def test_two_thousand_samples_get_through_where_there_is_room_for_sixty(tmp_path: Path) -> None:
    many(tmp_path, samples=2000, room=60)
