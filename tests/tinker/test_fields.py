"""Fields that the stories of the other tests have no use for, each sent to the real api over a fake engine, and found where it belongs."""

from typing import Any

import httpx
import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk

from bloomery.api.routes.tinker.names import SEQS_OF_A_CLONE
from bloomery.types.arrays import Array
from bloomery.types.operations import AdamParams, LoraSpec
from tests.tinker.over_fake_engine import KEY, MODEL, Served
from tests.tinker.samples import ME

ADAM = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.01, "grad_clip_norm": 2.0}
PARTS = ("train_attn", "train_mlp", "train_unembed")
TARGETS, WEIGHTS = np.array([4, 5, 6], "<i8"), np.array([0.5, -1.0, 2.0], "<f4")
DTYPES = {"<i8": sdk.DTYPE_INT64, "<f4": sdk.DTYPE_FLOAT32, "<i4": sdk.DTYPE_INT32, "<u2": sdk.DTYPE_BFLOAT16}


@pytest.fixture
def session(server: Served) -> str:
    return said(post(server, "/create_session", {"sdk_version": "0.38.0"}))["session_id"]


@pytest.fixture
def run(server: Served, session: str) -> str:
    return said(post(server, "/create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}))[
        "model_id"
    ]


def post(server: Served, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1{path}", json=body, headers={"x-api-key": KEY})


def get(server: Served, path: str, **query: object) -> Any:
    return said(httpx.get(f"{server.url}/api/v1{path}", params=query, headers={"x-api-key": KEY}))


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def result(server: Served, accepted: httpx.Response) -> httpx.Response:
    """What became of an operation."""
    return post(server, "/retrieve_future", {"request_id": said(accepted)["request_id"]})


def forward_backward(server: Served, message: sdk.ForwardBackwardRequest) -> httpx.Response:
    headers = {"x-api-key": KEY, "content-type": "application/x-protobuf"}
    return result(server, httpx.post(f"{server.url}/api/v1/forward_backward", content=message.SerializeToString(), headers=headers))


def message(run: str, seq: int = 1) -> tuple[sdk.ForwardBackwardRequest, Any]:
    """A request with one datum of three tokens, and that datum."""
    request = sdk.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    return request, datum


def put(datum: Any, **inputs: np.ndarray) -> None:
    """Give a datum inputs; two bytes are the upper half of a float32."""
    for name, values in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = DTYPES[values.dtype.str], values.tobytes()
        tensor.shape.extend(values.shape)


# Sessions


@pytest.mark.contract("POST /api/v1/create_session", "user_metadata", "display_name", "project_id")
@pytest.mark.contract("POST /api/v1/create_session", "tags", ignored="kept with the session; no route shows them")
def test_a_session_is_kept_as_it_was_begun(server: Served) -> None:
    asked = {"tags": ["a", "b"], "user_metadata": {"k": "v"}, "display_name": "Whole", "project_id": "default", "sdk_version": "0.38.0"}
    session = said(post(server, "/create_session", asked))["session_id"]
    shown = get(server, f"/sessions/{session}")
    assert (shown["user_metadata"], shown["display_name"]) == ({"k": "v"}, "Whole")
    assert server.do(lambda: server.services.sessions.get(ME, session)).tags == ["a", "b"]


@pytest.mark.contract("POST /api/v1/create_session", "project_id", refused="another project than the key's")
def test_a_session_does_not_begin_in_another_project(server: Served) -> None:
    answer = post(server, "/create_session", {"sdk_version": "0.38.0", "project_id": "elsewhere"})
    assert (answer.status_code, answer.json()["field"]) == (400, "project_id")


@pytest.mark.contract("POST /api/v1/sessions/{session_id}/finish", "reason.type", "detail")
def test_why_a_session_ended_is_found_again(server: Served, session: str) -> None:
    said(post(server, f"/sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": "out of data"}))
    (found,) = said(post(server, "/sessions/search", {"session_id": session, "user_metadata": {}, "limit": 1}))["sessions"]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "out of data"}


@pytest.mark.contract("GET /api/v1/sessions", "limit", "offset")
@pytest.mark.contract("GET /api/v1/training_runs", "limit", "offset")
@pytest.mark.contract(
    "GET /api/v1/training_runs", "access_scope", ignored="a key sees its project, so that what it owns and what it can reach are the same"
)
def test_lists_are_read_page_by_page(server: Served, session: str) -> None:
    new = {"session_id": session, "base_model": MODEL, "lora_config": {"rank": 4}}
    runs = [said(post(server, "/create_model", new | {"model_seq_id": number}))["model_id"] for number in range(3)]
    pages = [get(server, "/training_runs", limit=1, offset=offset, access_scope="accessible")["training_runs"] for offset in range(3)]
    assert [[run["training_run_id"] for run in page] for page in pages] == [[name] for name in reversed(runs)]
    later = said(post(server, "/create_session", {"sdk_version": "0.38.0"}))["session_id"]
    assert [get(server, "/sessions", limit=1, offset=offset)["sessions"] for offset in range(2)] == [[later], [session]]


@pytest.mark.contract("GET /api/v1/billing/usage/checkpoints/current", "project_id")
def test_storage_is_that_of_the_project(server: Served) -> None:
    assert get(server, "/billing/usage/checkpoints/current", project_id="default") == get(server, "/billing/usage/checkpoints/current")


@pytest.mark.contract("GET /api/v1/billing/usage/checkpoints/current", "project_id", refused="another project than the key's")
def test_storage_of_another_project_is_not_told(server: Served) -> None:
    url = f"{server.url}/api/v1/billing/usage/checkpoints/current"
    answer = httpx.get(url, params={"project_id": "elsewhere"}, headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["field"]) == (400, "project_id")


# Runs


@pytest.mark.contract("POST /api/v1/get_info", "model_id")
@pytest.mark.contract(
    "POST /api/v1/create_model",
    "session_id",
    "model_seq_id",
    "base_model",
    "user_metadata",
    "lora_config.rank",
    "lora_config.seed",
    "optimizer_config.type",
)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.contract("POST /api/v1/create_model", f"lora_config.{part}")) for part in PARTS]
)
def test_a_run_is_made_as_it_is_asked_for(server: Served, session: str, part: str) -> None:
    lora = {"rank": 6, "seed": 11, **{each: each != part for each in PARTS}}
    new = {"session_id": session, "model_seq_id": 4, "base_model": MODEL, "lora_config": lora, "optimizer_config": {"type": "adamw"}}
    name = said(result(server, post(server, "/create_model", new | {"user_metadata": {"purpose": "fields"}})))["model_id"]
    assert name == f"{session}:train:4"
    info = said(post(server, "/get_info", {"model_id": name}))
    assert (info["model_name"], info["lora_rank"]) == (MODEL, 6)
    assert get(server, f"/training_runs/{name}")["user_metadata"] == {"purpose": "fields"}
    said(result(server, post(server, "/optim_step", {"model_id": name, "seq_id": 1, "adam_params": {}})))
    assert server.engine.opened[-1].spec.lora == LoraSpec(**lora)


@pytest.mark.contract("POST /api/v1/optim_step", *(f"adam_params.{name}" for name in ADAM))
def test_every_number_of_a_step_reaches_the_engine(server: Served, run: str) -> None:
    said(result(server, post(server, "/optim_step", {"model_id": run, "seq_id": 1, "adam_params": ADAM})))
    assert server.engine.executed[-1].operation.adam == AdamParams(**ADAM)


@pytest.mark.contract("POST /api/v1/optim_step", "optimizer_params.type", refused="adamw is the only optimizer, whose numbers are `adam_params`")
@pytest.mark.parametrize("kind", ["adamw", "dimuon"])
def test_numbers_of_another_optimizer_are_refused_by_name(server: Served, run: str, kind: str) -> None:
    answer = result(server, post(server, "/optim_step", {"model_id": run, "seq_id": 1, "optimizer_params": {"type": kind, "learning_rate": 0.1}}))
    assert (answer.json()["category"], "optimizer_params" in answer.json()["error"] or "adam_params" in answer.json()["error"]) == ("user", True)


# Batches


def of_types(*names: str) -> list[str]:
    return [f"data.loss_fn_inputs.*.dtype=DTYPE_{name}" for name in names]


@pytest.mark.contract("POST /api/v1/forward_backward", "data.loss_fn_inputs.*.dense", "data.loss_fn_inputs.*.shape")
@pytest.mark.parametrize(
    ("targets", "weights"),
    [
        pytest.param(TARGETS, WEIGHTS, marks=pytest.mark.contract("POST /api/v1/forward_backward", *of_types("INT64", "FLOAT32")), id="wide"),
        pytest.param(
            TARGETS.astype("<i4"),
            np.array([0x3F00, 0xBF80, 0x4000], "<u2"),
            marks=pytest.mark.contract("POST /api/v1/forward_backward", *of_types("INT32", "BFLOAT16")),
            id="narrow",
        ),
    ],
)
def test_values_of_every_type_arrive(server: Served, run: str, targets: np.ndarray, weights: np.ndarray) -> None:
    request, datum = message(run)
    put(datum, target_tokens=targets, weights=weights)
    assert forward_backward(server, request).status_code == 200
    (arrived,) = server.engine.executed[-1].operation.data
    assert arrived.inputs == {"target_tokens": Array.of(TARGETS), "weights": Array.of(WEIGHTS)}


CHUNKS = "data.model_input"
IMAGE = ("data", "format", "expected_tokens", "override_dimensions.width", "override_dimensions.height")


@pytest.mark.contract("POST /api/v1/forward_backward", *(f"{CHUNKS}.image.{name}" for name in IMAGE), refused="chunks of text alone")
def test_an_image_is_refused(server: Served, run: str) -> None:
    request, datum = message(run)
    image = datum.model_input.add().image
    image.data, image.format, image.expected_tokens = b"png", "png", 4
    image.override_dimensions.width = image.override_dimensions.height = 2
    answer = forward_backward(server, request).json()
    assert (answer["category"], "chunk of kind image" in answer["error"]) == ("user", True)


@pytest.mark.contract("POST /api/v1/forward_backward", f"{CHUNKS}.dmel.dmel", refused="chunks of text alone")
def test_a_sound_is_refused(server: Served, run: str) -> None:
    request, datum = message(run)
    datum.model_input.add().dmel.dmel = b"sound"
    answer = forward_backward(server, request).json()
    assert (answer["category"], "chunk of kind dmel" in answer["error"]) == ("user", True)


@pytest.mark.contract(
    "POST /api/v1/forward_backward",
    *(
        f"data.{side}.{kind}.{name}"
        for side in ("model_input_spans", "loss_fn_input_spans")
        for kind in ("prompt_tokens", "sampled_tokens")
        for name in ("sequence_id", "offset", "length")
    ),
    ignored="checked to tile the datum; no loss here needs to know more",
)
def test_provenance_changes_nothing_of_what_is_computed(server: Served, run: str) -> None:
    for seq in (1, 2):
        request, datum = message(run, seq)
        request.loss_fn = "importance_sampling"
        put(datum, target_tokens=TARGETS, logprobs=np.zeros(3, "<f4"), advantages=np.ones(3, "<f4"))
        for spans in (datum.model_input_spans, datum.loss_fn_input_spans) if seq == 2 else ():
            spans.add().prompt_tokens.CopyFrom(sdk.PromptProvenanceSpan(sequence_id="a", offset=3, length=2))
            spans.add().sampled_tokens.CopyFrom(sdk.SampledProvenanceSpan(sequence_id="a", offset=5, length=1))
        assert forward_backward(server, request).status_code == 200
    plain, annotated = (execute.operation for execute in server.engine.executed[-2:])
    assert plain == annotated


@pytest.mark.contract("POST /api/v1/forward_backward", "loss_fn_config.*", "loss_fn_config_v2.*.number")
def test_options_arrive_by_either_map(server: Served, run: str) -> None:
    for seq in (1, 2):
        request, datum = message(run, seq)
        request.loss_fn = "dro"
        put(datum, target_tokens=TARGETS, logprobs=np.zeros(3, "<f4"), advantages=np.ones(3, "<f4"))
        if seq == 1:
            request.loss_fn_config["beta"] = 0.5
        else:
            request.loss_fn_config_v2["beta"].number = 0.5
        assert forward_backward(server, request).status_code == 200
        assert server.engine.executed[-1].operation.loss_config == {"beta": 0.5}


# Samples


@pytest.mark.contract("POST /api/v1/retrieve_futures", "target.cloned_sampler_id", "timeout")
def test_a_copy_of_a_sampler_hears_of_its_own_samples(server: Served, session: str) -> None:
    new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = said(post(server, "/create_sampling_session", new))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    ask = {"sampling_session_id": sampler, "seq_id": SEQS_OF_A_CLONE, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    future = said(post(server, "/asample", ask))["request_id"]

    def ended(clone: int) -> list[str]:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
        return [each["request_id"] for each in said(post(server, "/retrieve_futures", {"target": target, "timeout": 15 * clone}))["completions"]]

    assert ended(1) == [future]
    assert ended(0) == []


# OpenAI's contract


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.contract(f"{name} /oai/api/v1/{{path:path}}", refused="all else of OpenAI's contract"))
        for name in ("DELETE", "GET", "PATCH", "POST", "PUT")
    ],
)
def test_what_openais_contract_has_beside_is_refused_in_words(server: Served, method: str) -> None:
    answer = httpx.request(method, f"{server.url}/oai/api/v1/vector_stores", headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status_code, "is not offered" in answer.json()["error"]["message"]) == (400, True)


# What was sent, and is repeated by a refusal


LONG = "B" * 1_000_000


@pytest.mark.parametrize("where", ["loss_fn", "an input", "an option", "the text of an option", "an option in both forms", "an input's dtype"])
def test_a_refusal_repeats_no_more_of_a_name_than_a_name_has(server: Served, run: str, where: str) -> None:
    request, datum = message(run)
    put(datum, target_tokens=TARGETS, weights=WEIGHTS)
    match where:
        case "loss_fn":
            request.loss_fn = LONG
        case "an input":
            put(datum, **{LONG: WEIGHTS})
        case "an option":
            request.loss_fn_config[LONG] = 1.0
        case "the text of an option":
            request.loss_fn = "ppo"
            request.loss_fn_config_v2["clip_low_threshold"].text = LONG
        case "an option in both forms":
            request.loss_fn_config[LONG] = 1.0
            request.loss_fn_config_v2[LONG].number = 2.0
        case _:
            datum.loss_fn_inputs[LONG].dense = b"abc"
    refused = forward_backward(server, request).json()
    assert "B" * 61 + "..." in refused["error"]
    assert len(refused["error"]) < 1000


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/optim_step", {LONG: 1}),
        ("/optim_step", {"adam_params": ADAM | {LONG: 1}}),
        ("/optim_step", {"optimizer_params": {"type": LONG[:60_000]}}),
        ("/optim_step", {"optimizer_params": {"type": "adamw", LONG: 1}}),
        ("/save_weights_for_sampler", {"kind": LONG[:60_000]}),
        ("/load_weights", {"path": LONG[:60_000], "optimizer": False}),
        ("/load_weights", {"path": f"tinker://{LONG[:60_000]}/weights/a", "optimizer": False}),
    ],
)
def test_so_it_is_with_names_of_json(server: Served, run: str, path: str, sent: dict[str, Any]) -> None:
    refused = result(server, post(server, path, {"model_id": run, "seq_id": 1} | sent)).json()
    assert "B" * 61 + "..." in refused["error"]
    assert len(refused["error"]) < 1000
