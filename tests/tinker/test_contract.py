"""The unmodified SDK against the real api over a fake engine: every call that this server offers, and how it refuses the others."""

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from bloomery.api.routes.tinker.refused import REFUSED
from bloomery.services.access.principal import SCOPES, Principal
from tests.render.builders import byte_level
from tests.sdk import connected
from tests.services.fake_engine import CONTEXT
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served

ME = Principal("default", "test", SCOPES)
ADAM = types.AdamParams(learning_rate=1e-3)
FIRST_SAMPLED = 100


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[tinker.ServiceClient]:
    with connected(server, user_metadata={"who": "test"}, display_name="contract") as found:
        yield found


@pytest.fixture
def run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=8, seed=3, user_metadata={"purpose": "test"}).result()


@pytest.fixture
def rest(server: Served) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def datum(*tokens: int, targets: object = None) -> types.Datum:
    inputs = {"target_tokens": list(tokens) if targets is None else targets, "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def post(server: Served, path: str, body: object = None, key: str = KEY, **options: object) -> httpx.Response:
    headers = {"x-api-key": key, "content-type": "application/json"}
    return httpx.post(f"{server.url}/api/v1{path}", content=json.dumps(body), headers=headers, **options)


# Runs


def test_a_new_run_is_named_after_its_session(client: tinker.ServiceClient, run: tinker.TrainingClient) -> None:
    session, _, number = run.model_id.partition(":train:")
    assert session == client.holder.get_session_id()
    assert number.isdecimal()
    info = run.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 8, MODEL)
    assert run.get_tokenizer().encode("brown fox") == byte_level().encode("brown fox").ids


@pytest.mark.contract("POST /api/v1/forward_backward", "model_id", "seq_id", "loss_fn")
@pytest.mark.contract("POST /api/v1/optim_step", "model_id", "seq_id")
@pytest.mark.contract("POST /api/v1/retrieve_future", "allow_metadata_only", ignored="answers come whole, so that nobody needs their size first")
def test_operations_are_pipelined_and_each_has_its_result(run: tinker.TrainingClient) -> None:
    forward = run.forward_backward([datum(1, 2, 3), datum(4, 5)], "cross_entropy")
    step = run.optim_step(ADAM)
    only = run.forward([datum(1, 2, 3)], "cross_entropy")
    result = forward.result()
    assert "loss:sum" in result.metrics
    assert [output["logprobs"].shape for output in result.loss_fn_outputs] == [[3], [2]]
    assert step.result().metrics == {"grad_norm": 1.0, "optimizer_step": 1.0}
    assert len(only.result().loss_fn_outputs) == 1


@pytest.mark.contract(
    "POST /api/v1/forward_backward",
    "data.model_input.encoded_text.tokens",
    "forward_only",
    "data.loss_fn_inputs.*.shape",
    "data.loss_fn_inputs.*.sparse_csr.values",
    "data.loss_fn_inputs.*.sparse_csr.crow_indices",
    "data.loss_fn_inputs.*.sparse_csr.col_indices",
)
@pytest.mark.contract("any loss", "loss_fn_inputs.target_tokens")
@pytest.mark.contract("loss cross_entropy", "loss_fn_inputs.weights")
def test_what_arrives_is_what_was_sent(server: Served, run: tinker.TrainingClient) -> None:
    import torch

    soft = torch.zeros(3, 4, dtype=torch.int64)
    soft[1, 2] = 7
    weights = torch.zeros(3, 4)
    weights[1, 2] = -0.5
    made = types.Datum(model_input=prompt(1, 2, 3), loss_fn_inputs={"target_tokens": soft, "weights": weights})
    assert made.loss_fn_inputs["weights"].sparse_crow_indices is not None
    run.forward([made], "cross_entropy").result()
    (arrived,) = server.engine.executed[-1].operation.data
    assert not server.engine.executed[-1].operation.backward
    assert arrived.inputs["target_tokens"].numpy().tolist() == soft.tolist()
    assert arrived.inputs["weights"].numpy().tolist() == weights.tolist()


def test_a_custom_loss_of_the_client_works(run: tinker.TrainingClient) -> None:
    def loss(data, logprobs):
        return sum((row * row).sum() for row in logprobs), {"rows:sum": float(len(logprobs))}

    metrics = run.forward_backward_custom([datum(1, 2, 3)], loss).result().metrics
    assert {"loss:sum", "surrogate_loss:sum", "rows:sum"} <= metrics.keys()


@pytest.mark.contract("POST /api/v1/save_weights", "model_id", "seq_id", "path")
@pytest.mark.contract("POST /api/v1/load_weights", "path", "optimizer", "session_id", "model_seq_id")
def test_state_is_saved_and_new_runs_begin_from_it(client: tinker.ServiceClient, run: tinker.TrainingClient, server: Served) -> None:
    run.forward_backward([datum(1, 2)], "cross_entropy")
    run.optim_step(ADAM)
    path = run.save_state("after-one", ttl_seconds=7200, user_metadata={"note": "x"}).result().path
    assert path == f"tinker://{run.model_id}/weights/after-one"
    resumed = client.create_training_client_from_state_with_optimizer(path, user_metadata={"from": "after-one"}).result()
    assert resumed.model_id != run.model_id
    assert resumed.get_info().lora_rank == 8
    expected = run.forward([datum(5, 6)], "cross_entropy").result().metrics
    assert resumed.forward([datum(5, 6)], "cross_entropy").result().metrics == expected
    weights_only = client.create_training_client_from_state(path, base_model=MODEL).result()
    assert weights_only.forward([datum(5, 6)], "cross_entropy").result().metrics == expected
    assert [message.operation.optimizer for message in server.engine.executed if message.seq == 0] == [True, False]


@pytest.mark.contract("POST /api/v1/load_weights", "model_id", "seq_id")
def test_state_is_loaded_into_a_run_that_has_done_nothing_yet(client: tinker.ServiceClient, run: tinker.TrainingClient) -> None:
    path = run.save_state("start").result().path
    fresh = client.create_lora_training_client(base_model=MODEL, rank=8).result()
    with pytest.warns(FutureWarning):
        assert fresh.load_state_with_optimizer(path).result().path == path
    with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match="only the first operation"):
        fresh.load_state(path).result()


# Sampling


@pytest.mark.contract("POST /api/v1/save_weights_for_sampler", "model_id", "seq_id", "path", "sampling_session_seq_id")
@pytest.mark.contract("POST /api/v1/create_sampling_session", "model_path")
@pytest.mark.contract("GET /api/v1/samplers/{sampler_id}")
@pytest.mark.contract("POST /api/v1/asample", "num_samples", "sampling_params.max_tokens")
def test_saved_weights_are_sampled_by_path_and_by_session(client: tinker.ServiceClient, run: tinker.TrainingClient) -> None:
    path = run.save_weights_for_sampler("one").result().path
    assert path == f"tinker://{run.model_id}/sampler_weights/one"
    named = client.create_sampling_client(model_path=path).result()
    ephemeral = run.save_weights_and_get_sampling_client().result()
    for sampler in (named, ephemeral):
        assert sampler.get_base_model() == MODEL
        answer = sampler.sample(prompt(1, 2), 2, types.SamplingParams(max_tokens=3, seed=1)).result()
        assert [sequence.tokens for sequence in answer.sequences] == [[FIRST_SAMPLED + 10 * s + t for t in range(3)] for s in range(2)]
        assert [sequence.logprobs for sequence in answer.sequences] == [[-1.0] * 3] * 2
        assert [sequence.stop_reason for sequence in answer.sequences] == ["length"] * 2
        assert len({sequence.sequence_id for sequence in answer.sequences}) == 2


@pytest.mark.contract("POST /api/v1/asample", "prompt_logprobs", "prompt_logprobs_last_n")
def test_prompts_are_scored(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    assert sampler.compute_logprobs(prompt(1, 2, 3)).result() == [None, 0.0, 0.0]
    assert sampler.compute_logprobs(prompt(1, 2, 3), prompt_logprobs_last_n=1).result() == [None, None, 0.0]
    full = prompt(*[1] * CONTEXT)
    assert len(sampler.compute_logprobs(full).result()) == CONTEXT


@pytest.mark.contract("POST /api/v1/asample", "sampling_params.stop")
def test_a_stop_string_ends_a_sample_behind_its_last_token(client: tinker.ServiceClient, server: Served) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    # The tokens of this sample of the fake spell text; those of the ones before are bytes that are none.
    number, tokens = 16, [FIRST_SAMPLED + 160 + position for position in range(8)]
    stop = byte_level().decode(tokens[1:3], skip_special_tokens=False)
    before = len(server.engine.aborted)
    answer = sampler.sample(prompt(1), number + 2, types.SamplingParams(max_tokens=8, stop=stop)).result()
    assert (answer.sequences[number].tokens, answer.sequences[number].stop_reason) == (tokens[:3], "stop")
    assert (len(answer.sequences[0].tokens), answer.sequences[0].stop_reason) == (8, "length")
    _until(lambda: [abort.sample for abort in server.engine.aborted[before:]][:1] == [number])


@pytest.mark.parametrize(("stop", "tokens"), [(None, ["<|im_end|>"]), ([], []), (["x"], []), ([7, 8], [7, 8])])
def test_stop_tokens_are_those_given_and_else_the_models(client: tinker.ServiceClient, server: Served, stop: object, tokens: list) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
    expected = [byte_level().token_to_id(token) if isinstance(token, str) else token for token in tokens]
    assert list(server.engine.sampled[-1].params.stop_tokens) == expected


def test_stop_tokens_outside_of_the_vocabulary_are_refused(client: tinker.ServiceClient, server: Served) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    before = len(server.engine.sampled)
    with pytest.raises(tinker.BadRequestError, match=r"`sampling_params\.stop` holds ids outside the vocabulary"):
        sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1, stop=[7, 1 << 30])).result()
    assert len(server.engine.sampled) == before


def test_a_body_that_is_not_json_is_called_so(server: Served) -> None:
    headers = {"content-type": "application/json", "x-api-key": server.key}
    answer = httpx.post(f"{server.url}/api/v1/create_session", content=b"not json", headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (400, "body")
    assert answer.json()["error"].startswith("the body is not JSON")


def test_many_samples_at_once(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    futures = [sampler.sample(prompt(1, n % 50), 1, types.SamplingParams(max_tokens=2)) for n in range(100)]
    answers = [future.result() for future in futures]
    assert {tuple(answer.sequences[0].tokens) for answer in answers} == {(FIRST_SAMPLED, FIRST_SAMPLED + 1)}
    assert len({answer.sequences[0].sequence_id for answer in answers}) == 100


# Listing


@pytest.mark.contract("GET /api/v1/training_runs/{run_id}/checkpoints")
@pytest.mark.contract("DELETE /api/v1/training_runs/{run_id}/checkpoints/{folder}/{name}")
@pytest.mark.contract("POST /api/v1/weights_info", "tinker_path")
@pytest.mark.contract("GET /api/v1/training_runs")
@pytest.mark.contract("GET /api/v1/checkpoints")
def test_runs_and_checkpoints_are_listed_and_deleted(run: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    weights = run.save_state("kept").result().path
    sampler = run.save_weights_for_sampler("shown").result().path
    found = rest.get_training_run_by_tinker_path(weights).result()
    assert (found.training_run_id, found.base_model, found.lora_rank, found.corrupted) == (run.model_id, MODEL, 8, False)
    assert found.user_metadata == {"purpose": "test"}
    assert found.last_checkpoint.tinker_path == weights
    assert found.last_sampler_checkpoint.tinker_path == sampler
    listed = rest.list_checkpoints(run.model_id).result().checkpoints
    assert {checkpoint.checkpoint_id: checkpoint.checkpoint_type for checkpoint in listed} == {
        "weights/kept": "training",
        "sampler_weights/shown": "sampler",
    }
    assert rest.get_weights_info_by_tinker_path(weights).result().lora_rank == 8
    rest.set_checkpoint_ttl_from_tinker_path(sampler, 3600).result()
    rest.delete_checkpoint_from_tinker_path(weights).result()
    (left,) = rest.list_checkpoints(run.model_id).result().checkpoints
    assert left.tinker_path == sampler
    assert left.expires_at is not None
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs[0].training_run_id == run.model_id
    assert page.cursor.total_count >= 1
    assert sampler in {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints}


@pytest.mark.contract("GET /api/v1/sessions")
@pytest.mark.contract("GET /api/v1/sessions/{session_id}")
def test_sessions_know_what_they_made(client: tinker.ServiceClient, run: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    session_id = client.holder.get_session_id()
    sampler = run.save_weights_and_get_sampling_client().result()
    assert session_id in rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    assert (session.user_metadata, session.display_name) == ({"who": "test"}, "contract")
    assert run.model_id in session.training_run_ids
    assert sampler._sampling_session_id in session.sampler_ids


@pytest.mark.contract("GET /api/v1/get_server_capabilities")
@pytest.mark.contract("GET /api/v1/healthz")
def test_capabilities_name_the_base_models(rest: tinker.RestClient, server: Served) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == (MODEL, CONTEXT, True, True)
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}


# Bad input


BAD_DATA = {
    "token id 9999": datum(1, 9999),
    "lacks `weights`": types.Datum(model_input=prompt(1), loss_fn_inputs={"target_tokens": [1]}),
    "only encoded_text": types.Datum(model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), loss_fn_inputs={}),
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_bad_data_fail_as_the_users_and_the_run_goes_on(run: tinker.TrainingClient, message: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message) as failure:
        run.forward_backward([BAD_DATA[message]], "cross_entropy").result()
    assert failure.value.category is types.RequestErrorCategory.User
    assert run.forward_backward([datum(1, 2)], "cross_entropy").result().metrics


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_a_learning_rate_that_is_none_fails_as_the_users(run: tinker.TrainingClient, rate: float) -> None:
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        run.optim_step(types.AdamParams(learning_rate=rate)).result()


@pytest.mark.parametrize(("change", "message"), [({"rank": -1}, "rank is -1"), ({"rank": 10**9}, "rank is 1000000000")])
def test_impossible_runs_are_refused(client: tinker.ServiceClient, change: dict, message: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=message):
        client.create_lora_training_client(base_model=MODEL, **change).result()


def test_unknown_models_and_paths_are_not_found(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="unknown base model `nope`: this server has `tiny`"):
        client.create_lora_training_client(base_model="nope").result()
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(base_model="nope").result()
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state("tinker://x/weights/y").result()


def test_names_are_refused_in_their_place(run: tinker.TrainingClient) -> None:
    run.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="already"):
        run.save_state("twice").result()
    assert run.save_state("twice", overwrite=True).result().path.endswith("/weights/twice")
    with pytest.raises(tinker.RequestFailedError, match="cannot be a name"):
        run.save_state("a/b").result()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_sampling_parameters_are_refused_by_name(client: tinker.ServiceClient, change: dict, field: str) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    with pytest.raises(tinker.BadRequestError, match=field):
        sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1).model_copy(update=change)).result()


@pytest.mark.contract("POST /api/v1/save_weights_external", "age_encryption_recipients", refused="nothing is encrypted here")
@pytest.mark.contract("POST /api/v1/create_model", "optimizer_config.type", refused="any other than adamw")
def test_what_is_not_offered_is_refused_in_words(client: tinker.ServiceClient, run: tinker.TrainingClient) -> None:
    for refused in (
        lambda: run.save_weights_external("x", age_encryption_recipients=["age1x"]).result(),
        lambda: client.create_lora_training_client(base_model=MODEL, optimizer=types.DimuonOptimizerConfig()).result(),
    ):
        with pytest.raises(tinker.TinkerError, match="not offer"):
            refused()


@pytest.mark.parametrize(
    "method_and_path",
    [pytest.param(each, marks=pytest.mark.contract(" /api/v1".join(each), refused=what.partition(":")[0])) for each, what in REFUSED.items()],
)
def test_routes_that_are_not_offered_say_so(server: Served, method_and_path: tuple[str, str]) -> None:
    method, path = method_and_path
    answer = httpx.request(method, f"{server.url}/api/v1{path}", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()["code"]) == (400, "not_supported")


def test_a_wrong_key_is_an_authentication_error(server: Served) -> None:
    with pytest.raises(tinker.AuthenticationError, match="unknown API key"):
        tinker.RestClient(base_url=server.url, api_key="tml-wrong").get_server_capabilities().result()


# What the SDK does not show


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model_id": "x"}', b'{"model_id": "x", "seq_id": -1}', b'{"model_id": "\\ud800", "seq_id": 1}']
)
def test_an_undecodable_body_has_an_answer_with_a_body(server: Served, body: bytes) -> None:
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    answer = httpx.post(f"{server.url}/api/v1/optim_step", content=body, headers=headers)
    assert (answer.status_code, answer.json()["category"]) == (400, "user")


def test_a_number_that_makes_no_sense_is_named_as_this_contract_names_it(server: Served, run: tinker.TrainingClient) -> None:
    answer = post(server, "/optim_step", {"model_id": run.model_id, "seq_id": 10**6, "adam_params": {}})
    assert (answer.status_code, answer.json()["field"]) == (400, "seq_id")


def test_an_operation_that_makes_no_sense_keeps_its_place(server: Served, run: tinker.TrainingClient) -> None:
    for seq, name in enumerate(("momentum", "\ud800"), start=1):
        answer = post(server, "/optim_step", {"model_id": run.model_id, "seq_id": seq, "adam_params": {name: 0.9}})
        result = post(server, "/retrieve_future", {"request_id": answer.json()["request_id"]})
        assert (result.status_code, result.json()["category"], "adam_params" in result.json()["error"]) == (200, "user", True)


@pytest.mark.contract("POST /api/v1/optim_step", "model_id", "seq_id")
@pytest.mark.contract("POST /api/v1/create_sampling_session", "session_id", "sampling_session_seq_id", "base_model")
@pytest.mark.contract("POST /api/v1/asample", "sampling_session_id", "seq_id")
@pytest.mark.contract("POST /api/v1/retrieve_future", "request_id")
def test_repeated_requests_are_the_same_operation_and_the_same_sample(server: Served, run: tinker.TrainingClient) -> None:
    body = {"model_id": run.model_id, "seq_id": 1, "adam_params": {}}
    first, second = (post(server, "/optim_step", body).json() for _ in range(2))
    assert first == second
    answers = [post(server, "/retrieve_future", {"request_id": first["request_id"]}).json() for _ in range(2)]
    assert answers == [{"metrics": {"grad_norm": 1.0, "optimizer_step": 1.0}}] * 2
    session = run.model_id.split(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 900, "base_model": MODEL}
    assert post(server, "/create_sampling_session", sampler).json() == post(server, "/create_sampling_session", sampler).json()
    before = len(server.engine.sampled)
    ask = {"sampling_session_id": f"{session}:sample:900", "seq_id": 5, "prompt": _prompt([1]), "sampling_params": {"max_tokens": 1}}
    accepted = [post(server, "/asample", ask).json() for _ in range(2)]
    assert accepted[0] == accepted[1]
    sampled = [post(server, "/retrieve_future", {"request_id": accepted[0]["request_id"]}) for _ in range(2)]
    assert sampled[0].content == sampled[1].content
    assert sampled[0].headers["x-bloomery-version"]
    assert [each.headers["x-bloomery-logprobs"] for each in sampled] == ["processed_logprobs"] * 2
    assert len(server.engine.sampled) == before + 1


@pytest.mark.contract("POST /api/v1/optim_step", "seq_id")
def test_numbers_may_arrive_out_of_order(server: Served, run: tinker.TrainingClient) -> None:
    bodies = [{"model_id": run.model_id, "seq_id": seq, "adam_params": {"learning_rate": seq * 1e-3}} for seq in (3, 1, 2)]
    accepted = [post(server, "/optim_step", body).json()["request_id"] for body in bodies]
    steps = [post(server, "/retrieve_future", {"request_id": name}).json()["metrics"]["optimizer_step"] for name in accepted]
    assert steps == [3.0, 1.0, 2.0]


@pytest.mark.contract("POST /api/v1/cancel_future", "request_id")
def test_a_cancelled_sample_is_gone_and_the_engine_told(server: Served, run: tinker.TrainingClient) -> None:
    session = run.model_id.split(":")[0]
    post(server, "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 901, "base_model": MODEL})
    endless = {"sampling_session_id": f"{session}:sample:901", "seq_id": 0, "prompt": _prompt([0]), "sampling_params": {"max_tokens": 2}}
    name = post(server, "/asample", endless).json()["request_id"]
    _until(lambda: server.engine.sampled[-1].prompt.numpy()[0] == 0)
    before = len(server.engine.aborted)
    assert post(server, "/cancel_future", {"request_id": name}).json() == {}
    assert post(server, "/retrieve_future", {"request_id": name}).status_code == 410
    _until(lambda: len(server.engine.aborted) > before)


@pytest.mark.contract("POST /api/v1/session_heartbeat", "session_id")
@pytest.mark.contract("POST /api/v1/create_session", "sdk_version", ignored="kept with the session; no answer depends on it")
def test_a_finished_session_stops_its_heartbeat_and_takes_nothing_new(server: Served) -> None:
    session = post(server, "/create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
    beat = {"session_id": session, "type": "session_heartbeat"}
    assert post(server, "/session_heartbeat", beat).status_code == 200
    assert post(server, f"/sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 200
    assert post(server, "/session_heartbeat", beat).status_code == 410
    new = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert post(server, "/create_model", new).status_code == 410


@pytest.mark.contract("POST /api/v1/telemetry", "events")
@pytest.mark.contract("POST /api/v1/telemetry", "session_id", ignored="what is logged of an event does not name it")
def test_telemetry_is_accepted_and_errors_are_logged(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    event = {"event": "GENERIC_EVENT", "event_name": "odd", "severity": "ERROR", "event_data": {"exception": "boom"}}
    body = {"session_id": "sessionless-1", "platform": "x", "sdk_version": "0.38.0", "process_uuid": "u", "events": [event]}
    assert post(server, "/telemetry", body).json() == {"status": "accepted"}
    assert "a client reports 'odd': 'boom'" in caplog.text


def test_another_project_sees_nothing(server: Served, run: tinker.TrainingClient) -> None:
    key = server.do(lambda: server.services.auth.create(ME, "stranger", frozenset({"train", "infer", "read"}), project="elsewhere")).key
    run.save_state("mine").result()
    stranger = tinker.RestClient(base_url=server.url, api_key=key)
    assert stranger.list_training_runs().result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        stranger.get_training_run(run.model_id).result()
    with pytest.raises(tinker.NotFoundError):
        stranger.get_weights_info_by_tinker_path(f"tinker://{run.model_id}/weights/mine").result()
    future = f"operation|{run.model_id}|1|mine"
    assert post(server, "/retrieve_future", {"request_id": future}).status_code == 200
    assert post(server, "/retrieve_future", {"request_id": future}, key=key).status_code == 404
    assert post(server, "/optim_step", {"model_id": run.model_id, "seq_id": 2, "adam_params": {}}, key=key).status_code == 404


def test_a_key_without_the_scope_is_refused(server: Served, run: tinker.TrainingClient) -> None:
    key = server.do(lambda: server.services.auth.create(ME, "reader", frozenset({"read"}))).key
    assert post(server, "/optim_step", {"model_id": run.model_id, "seq_id": 1, "adam_params": {}}, key=key).status_code == 403


def test_futures_of_operations_outlive_the_api_and_those_of_samples_say_that_they_do_not(tmp_path) -> None:
    with served(tmp_path) as first:
        session = post(first, "/create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
        post(first, "/create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}})
        name = f"{session}:train:0"
        step = post(first, "/optim_step", {"model_id": name, "seq_id": 1, "adam_params": {}}).json()["request_id"]
        save = post(first, "/save_weights_for_sampler", {"model_id": name, "seq_id": 2, "sampling_session_seq_id": 4}).json()["request_id"]
        expected = [post(first, "/retrieve_future", {"request_id": future}).json() for future in (step, save)]
        sampler = expected[1]["sampling_session_id"]
        ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": _prompt([1]), "sampling_params": {"max_tokens": 1}}
        sample = post(first, "/asample", ask).json()["request_id"]
        assert post(first, "/retrieve_future", {"request_id": sample}).status_code == 200
    with served(tmp_path) as second:
        assert [post(second, "/retrieve_future", {"request_id": future}).json() for future in (step, save)] == expected
        assert post(second, "/retrieve_future", {"request_id": sample}).status_code == 410
        assert post(second, "/asample", ask).json()["request_id"] == sample
        assert post(second, "/retrieve_future", {"request_id": sample}).status_code == 200


@pytest.mark.slow
def test_a_poll_is_held_and_ends_in_time_to_be_repeated(server: Served, run: tinker.TrainingClient) -> None:
    server.loop.call_soon_threadsafe(server.engine.gate.clear)
    try:
        future = post(server, "/optim_step", {"model_id": run.model_id, "seq_id": 1, "adam_params": {}}).json()
        began_s = time.monotonic()
        answer = post(server, "/retrieve_future", {"request_id": future["request_id"]}, timeout=60.0)
        held_s = time.monotonic() - began_s
    finally:
        server.loop.call_soon_threadsafe(server.engine.gate.set)
    assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
    # Sooner, and a client that waits would ask without a pause; after 45 s the SDK gives up and pauses itself.
    assert 20 <= held_s < 45
    assert post(server, "/retrieve_future", {"request_id": future["request_id"]}, timeout=60.0).json()["metrics"]


def _prompt(tokens: list[int]) -> dict:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def _until(condition) -> None:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    asyncio.run(wait())
