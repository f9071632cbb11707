"""The OpenAI contract under `/oai/api/v1`, spoken by the unmodified `openai` SDK, on a base model and on weights by their `tinker://` path."""

from collections.abc import Iterator

import httpx
import openai
import pytest
import tinker
from openai import OpenAI

from tests.live import LiveServer
from tests.tinker.tenants import MODEL, new_key, post, train

MESSAGES = [{"role": "user", "content": "Say which package reads CSV files."}]
SAMPLED = {"max_tokens": 16, "temperature": 1.0, "seed": 17}


@pytest.fixture(scope="module")
def weights(client: tinker.ServiceClient) -> str:
    """Path of trained sampler weights."""
    run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    train(run, [5, 17, 99, 250, 31, 7, 64, 12], 6)
    return run.save_weights_for_sampler("for-openai").result().path


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/oai/api/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


@pytest.mark.contract("GET /oai/api/v1/models")
@pytest.mark.contract("GET /oai/api/v1/models/{name:path}")
def test_models_are_listed_and_weights_are_found_by_their_path(sdk: OpenAI, weights: str) -> None:
    assert MODEL in {model.id for model in sdk.models.list()}
    assert sdk.models.retrieve(MODEL).bloomery["kind"] == "base"
    assert sdk.models.retrieve(weights).bloomery["kind"] == "snapshot"


@pytest.mark.contract("GET /oai/api/v1/models", "after")
@pytest.mark.contract("GET /oai/api/v1/models", "limit")
@pytest.mark.contract("GET /oai/api/v1/models", "order")
def test_models_come_page_by_page(sdk: OpenAI) -> None:
    names = [model.id for model in sdk.models.list()]
    first = sdk.models.list(extra_query={"limit": 1})
    assert [model.id for model in first] == names[:1]
    assert (first.first_id, first.last_id, first.has_more) == (names[0], names[0], len(names) > 1)
    rest = sdk.models.list(extra_query={"after": first.last_id})
    assert [model.id for model in rest] == names[1:]
    assert [model.id for model in sdk.models.list(extra_query={"order": "desc"})] == names[::-1]


@pytest.mark.contract("POST /oai/api/v1/chat/completions")
@pytest.mark.contract("POST /oai/api/v1/completions")
def test_weights_answer_and_stream_the_same(sdk: OpenAI, weights: str) -> None:
    for model in (MODEL, weights):
        whole = sdk.chat.completions.create(model=model, messages=MESSAGES, **SAMPLED)
        assert (whole.model, whole.object) == (model, "chat.completion")
        assert whole.usage.completion_tokens > 0
        chunks = list(sdk.chat.completions.create(model=model, messages=MESSAGES, stream=True, **SAMPLED))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    base, trained = (sdk.completions.create(model=model, prompt="The csv module", **SAMPLED) for model in (MODEL, weights))
    assert base.choices[0].text
    assert base.system_fingerprint != trained.system_fingerprint


@pytest.mark.contract("POST /oai/api/v1/responses")
@pytest.mark.contract("POST /oai/api/v1/embeddings")
def test_weights_answer_as_responses_and_give_vectors(sdk: OpenAI, weights: str) -> None:
    answer = sdk.responses.create(model=weights, input="Say which package reads CSV files.", max_output_tokens=8)
    assert (answer.model, answer.object) == (weights, "response")
    base, trained = (sdk.embeddings.create(model=model, input="The csv module").data[0].embedding for model in (MODEL, weights))
    assert len(base) == len(trained)
    assert base != trained


def test_answers_are_those_of_the_other_door(sdk: OpenAI, weights: str, live_server: LiveServer) -> None:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as other:
        texts = [door.completions.create(model=weights, prompt="The csv module", **SAMPLED).choices[0].text for door in (sdk, other)]
    assert texts[0] == texts[1]


def test_errors_are_those_of_the_contract(sdk: OpenAI, weights: str, live_server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError, match="never saved, were deleted, expired") as missing:
        sdk.chat.completions.create(model="tinker://session-x:train:0/sampler_weights/none", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="not for sampling"):
        sdk.chat.completions.create(model=weights.replace("sampler_weights", "weights"), messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="is not offered"):
        sdk.images.generate(model=MODEL, prompt="x")
    stranger = new_key(live_server, "apart", "reader", ["infer"])
    with pytest.raises(openai.NotFoundError):
        sdk.with_options(api_key=stranger).chat.completions.create(model=weights, messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        sdk.with_options(api_key="tml-wrong").models.list()


def test_tokens_open_this_door_too(sdk: OpenAI, live_server: LiveServer) -> None:
    token = post(live_server, "/auth/token", {}).json()["jwt"]
    assert sdk.with_options(api_key=token).completions.create(model=MODEL, prompt="x", max_tokens=1).choices[0].finish_reason
    forged = httpx.get(f"{live_server.url}/oai/api/v1/models", headers={"authorization": f"Bearer {token[:-3]}"})
    assert (forged.status_code, forged.json()["error"]["code"]) == (401, "invalid_api_key")
