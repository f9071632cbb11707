"""Looking at runs, checkpoints and sessions, and sharing them, with the unmodified SDK against `bloomery up`."""

import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.types.shared.untyped_api_future import UntypedAPIFuture

from tests.live import LiveServer, wait_until
from tests.sdk import connected
from tests.tinker.tenants import ADAM, MODEL, loss, new_key, post, rest_of, train

TOKENS = [5, 17, 99, 250, 31, 7, 64, 12]
PROMPT = types.ModelInput.from_ints(TOKENS)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with connected(live_server, user_metadata={"purpose": "rest"}, display_name="Nightly rest run") as found:
        yield found


@pytest.fixture
def rest(live_server: LiveServer) -> tinker.RestClient:
    return rest_of(live_server, live_server.key)


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    run = client.create_lora_training_client(
        base_model=MODEL, rank=4, seed=1, train_unembed=False, user_metadata={"renderer_name": "chatml"}
    ).result()
    train(run, TOKENS, 3)
    return run


@pytest.fixture(scope="module")
def stranger(live_server: LiveServer) -> str:
    """A key of another project."""
    return new_key(live_server, "elsewhere", "stranger")


@pytest.fixture(scope="module")
def their_client(live_server: LiveServer, stranger: str) -> Iterator[tinker.ServiceClient]:
    with connected(live_server, key=stranger) as found:
        yield found


# Runs and checkpoints


@pytest.mark.contract("GET /api/v1/training_runs", "project_id")
@pytest.mark.contract("GET /api/v1/training_runs", "project_id", refused="another project than the key's")
@pytest.mark.contract("GET /api/v1/training_runs/{run_id}")
@pytest.mark.contract(
    "GET /api/v1/training_runs/{run_id}", "access_scope", ignored="a key sees its project, so that what it owns and what it can reach are the same"
)
def test_a_run_tells_everything_about_itself(trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    info = trained.get_info()
    assert (info.model_id, info.is_lora, info.lora_rank, info.model_name) == (trained.model_id, True, 4, MODEL)
    assert (info.model_data.arch, info.model_data.model_name) == ("qwen3", MODEL)
    assert info.model_data.tokenizer_id
    assert info.optimizer_config == types.AdamOptimizerConfig()
    run = rest.get_training_run(trained.model_id, access_scope="accessible").result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank, run.corrupted) == (trained.model_id, MODEL, True, 4, False)
    assert run.model_owner == rest.whoami().result().user_urn == "tml:organization_user:default"
    assert run.user_metadata == {"renderer_name": "chatml"}
    assert datetime.now(UTC) - run.last_request_time < timedelta(hours=1)
    listed = rest.list_training_runs(limit=50, project_id="default").result()
    assert run.training_run_id in {each.training_run_id for each in listed.training_runs}
    with pytest.raises(tinker.BadRequestError, match="project_id"):
        rest.list_training_runs(project_id="another").result()


@pytest.mark.contract("POST /api/v1/save_weights", "user_metadata", "ttl_seconds")
@pytest.mark.contract("POST /api/v1/save_weights_for_sampler", "user_metadata", "ttl_seconds")
@pytest.mark.contract("GET /api/v1/training_runs/{run_id}/checkpoints")
@pytest.mark.contract("GET /api/v1/checkpoints", "limit", "offset")
def test_the_latest_checkpoints_are_shown_with_the_run(trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    trained.save_state("older").result()
    newer = trained.save_state("newer", user_metadata={"step": "3"}, ttl_seconds=7200).result().path
    sampler = trained.save_weights_for_sampler("latest", user_metadata={"eval": "0.5"}, ttl_seconds=7200).result().path
    run = rest.get_training_run_by_tinker_path(newer).result()
    assert run.last_checkpoint.tinker_path == newer
    assert run.last_checkpoint.user_metadata == {"step": "3"}
    for saved in (run.last_checkpoint, run.last_sampler_checkpoint):
        assert saved.expires_at - datetime.now(UTC) < timedelta(seconds=7200)
    assert (run.last_sampler_checkpoint.tinker_path, run.last_sampler_checkpoint.user_metadata) == (sampler, {"eval": "0.5"})
    assert run.last_checkpoint.size_bytes > 0
    of_run = rest.list_checkpoints(trained.model_id).result().checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in of_run][:3] == ["sampler_weights/latest", "weights/newer", "weights/older"]
    of_user = rest.list_user_checkpoints(limit=2).result()
    assert [checkpoint.tinker_path for checkpoint in of_user.checkpoints] == [sampler, newer]
    assert of_user.cursor.total_count >= 3
    assert rest.list_user_checkpoints(limit=1, offset=1).result().checkpoints[0].tinker_path == newer


@pytest.mark.contract("POST /api/v1/save_weights", "path", "overwrite", "user_metadata")
def test_a_name_is_taken_until_it_may_be_overwritten(trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = trained.save_state("again", user_metadata={"n": "1"}).result().path
    with pytest.raises(tinker.RequestFailedError, match="`again` already"):
        trained.save_state("again").result()
    assert trained.save_state("again", overwrite=True, user_metadata={"n": "2"}).result().path == path
    (found,) = [each for each in rest.list_checkpoints(trained.model_id).result().checkpoints if each.tinker_path == path]
    assert found.user_metadata == {"n": "2"}
    with pytest.raises(tinker.RequestFailedError, match="metadata is longer"):
        trained.save_state("verbose", user_metadata={"x": "y" * 65_000, "z": "y" * 1000}).result()


@pytest.mark.contract("PUT /api/v1/training_runs/{run_id}/checkpoints/{folder}/{name}/ttl", "ttl_seconds")
@pytest.mark.contract("DELETE /api/v1/training_runs/{run_id}/checkpoints/{folder}/{name}")
def test_checkpoints_expire_and_are_deleted(trained: tinker.TrainingClient, rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    kept, gone = (trained.save_state(name).result().path for name in ("kept", "gone"))
    brief = trained.save_weights_for_sampler("brief").result().path
    rest.set_checkpoint_ttl_from_tinker_path(kept, 3600).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(brief, 1).result()
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(kept, 0).result()

    def paths() -> dict[str, types.Checkpoint]:
        return {each.tinker_path: each for each in rest.list_checkpoints(trained.model_id).result().checkpoints}

    wait_until(lambda: brief not in paths())
    assert paths()[kept].expires_at is None
    with pytest.raises(tinker.NotFoundError, match="expired"):
        client.create_sampling_client(model_path=brief).result()
    rest.delete_checkpoint_from_tinker_path(gone).result()
    assert gone not in paths()
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(gone).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(gone).result()


def test_an_expired_state_is_loaded_by_nobody(trained: tinker.TrainingClient, rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    path = trained.save_state("fleeting").result().path
    rest.set_checkpoint_ttl_from_tinker_path(path, 1).result()
    wait_until(lambda: path not in {each.tinker_path for each in rest.list_checkpoints(trained.model_id).result().checkpoints})
    for begin in (client.create_training_client_from_state, client.create_training_client_from_state_with_optimizer):
        with pytest.raises(tinker.NotFoundError, match="expired") as refused:
            begin(path).result()
        assert refused.value.response.json()["field"] == "path"
    with pytest.raises(tinker.NotFoundError, match="expired"):
        rest.get_weights_info_by_tinker_path(path).result()
    train(trained, TOKENS)
    assert trained.save_state("fleeting").result().path == path
    assert loss(client.create_training_client_from_state(path).result(), TOKENS) == loss(trained, TOKENS)


@pytest.mark.contract("POST /api/v1/weights_info", "tinker_path")
def test_weights_say_what_they_belong_to(trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    for path in (trained.save_state("info").result().path, trained.save_weights_for_sampler("info").result().path):
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 4)
        assert (info.train_unembed, info.train_mlp, info.train_attn) == (False, True, True)
        assert info.optimizer_config == types.AdamOptimizerConfig()


@pytest.mark.contract("POST /api/v1/unload_model", "model_id")
def test_a_run_leaves_memory_and_comes_back(client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    expected = loss(trained, TOKENS)
    holder = client.holder

    async def unload() -> types.UnloadModelResponse:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as http:
            body = types.UnloadModelRequest(model_id=trained.model_id).model_dump()
            future = await http.post("/api/v1/unload_model", body=body, cast_to=UntypedAPIFuture)
        unloaded = _APIFuture(types.UnloadModelResponse, holder, future, request_start_time=time.time(), request_type="UnloadModel")
        return await unloaded.result_async()

    assert holder.run_coroutine_threadsafe(unload()).result().model_id == trained.model_id
    assert loss(trained, TOKENS) == expected


# Loading


@pytest.mark.contract("POST /api/v1/load_weights", "base_model", "user_metadata", "optimizer_config.type")
@pytest.mark.contract("POST /api/v1/load_weights", "optimizer_config.type", refused="any other than adamw")
def test_a_load_creates_a_run_of_the_checkpoints_shape(client: tinker.ServiceClient, trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = trained.save_state("parent").result().path
    heir = client.create_training_client_from_state(
        path, base_model=MODEL, user_metadata={"from": path}, optimizer=types.AdamOptimizerConfig()
    ).result()
    info = heir.get_info()
    assert (info.lora_rank, info.optimizer_config) == (4, types.AdamOptimizerConfig())
    assert loss(heir, TOKENS) == loss(trained, TOKENS)
    assert rest.get_training_run(heir.model_id).result().user_metadata == {"from": path}
    with pytest.raises(tinker.BadRequestError, match="optimizer `dimuon` is not offered"):
        client.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result()
    with pytest.raises(tinker.NotFoundError, match="unknown base model `other`"):
        client.create_training_client_from_state(path, base_model="other").result()
    snapshot = trained.save_weights_for_sampler("no-state").result().path
    with pytest.raises(tinker.BadRequestError, match="load a `weights` path"):
        client.create_training_client_from_state(snapshot).result()


def test_a_run_that_has_moved_takes_no_state(client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    path = trained.save_state("for-others").result().path
    run = client.create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert run.load_state(path).result().path == path
        assert loss(run, TOKENS) == loss(trained, TOKENS)
        with pytest.raises(tinker.RequestFailedError, match="only the first operation") as failure:
            run.load_state(path).result()
    assert failure.value.category is types.RequestErrorCategory.User
    # What is refused so late spoils the next step, and only that.
    with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
        run.optim_step(ADAM).result()
    train(run, TOKENS)


@pytest.mark.contract("POST /api/v1/create_model", "optimizer_config.type", refused="any other than adamw")
def test_other_optimizers_and_foreign_fields_are_refused_by_name(live_server: LiveServer, client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"optimizer_config.*dimuon"):
        client.create_lora_training_client(base_model=MODEL, optimizer=types.DimuonOptimizerConfig()).result()
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer_params.*dimuon"):
        run.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    new = {"session_id": client.holder.get_session_id(), "model_seq_id": 700, "base_model": MODEL, "lora_config": {"rank": 4}}
    answer = post(live_server, "/create_model", new | {"optimizer_config": {"type": "adamw", "amsgrad": True}})
    assert (answer.status_code, answer.json()["field"]) == (400, "optimizer_config")
    load = {"model_id": run.model_id, "seq_id": 2, "path": "tinker://a/weights/b", "optimizer": False}
    for field, value in {"base_model": MODEL, "user_metadata": {}, "optimizer_config": {"type": "adamw"}}.items():
        future = post(live_server, "/load_weights", load | {field: value}).json()["request_id"]
        load["seq_id"] += 1
        failed = post(live_server, "/retrieve_future", {"request_id": future}).json()
        assert (failed["category"], field in failed["error"]) == ("user", True)
    with pytest.raises(tinker.RequestFailedError, match="earlier operation failed"):
        run_after(run, load["seq_id"]).optim_step(ADAM).result()


def run_after(run: tinker.TrainingClient, seq: int) -> tinker.TrainingClient:
    """The client, made to go on behind operations that were not its own."""
    run._request_id_counter = run._turn_counter = seq - 1
    return run


# Sampling in flight


@pytest.mark.contract("POST /api/v1/save_weights_for_sampler", "kind")
@pytest.mark.contract("GET /api/v1/samplers/{sampler_id}")
def test_samplers_in_flight_follow_their_run(client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=2).result()
    fixed = run.save_weights_and_get_sampling_client().result()
    first = run.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(PROMPT).result()
    assert before == fixed.compute_logprobs(PROMPT).result()
    train(run, TOKENS, 2)
    assert first.compute_logprobs(PROMPT).result() == before
    second = run.save_weights_and_get_sampling_client(kind="inflight").result()
    after = second.compute_logprobs(PROMPT).result()
    assert after != before
    assert first.compute_logprobs(PROMPT).result() == after
    assert fixed.compute_logprobs(PROMPT).result() == before
    assert {first._sampling_session_id, second._sampling_session_id} <= set(rest.get_session(client.holder.get_session_id()).result().sampler_ids)
    sampler = rest.get_sampler(second._sampling_session_id).result()
    assert (sampler.sampler_id, sampler.base_model, sampler.model_path) == (second._sampling_session_id, MODEL, None)


@pytest.mark.contract("POST /api/v1/save_weights_for_sampler", "kind", refused="any other than snapshot and inflight")
def test_kinds_of_sampler_weights_are_checked(live_server: LiveServer, client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    bad = [{"kind": "frozen", "sampling_session_seq_id": 900}, {"kind": "inflight", "path": "named"}, {"kind": "snapshot"}]
    for seq, (body, field) in enumerate(zip(bad, ["kind", "path", "path"], strict=True), start=1):
        future = post(live_server, "/save_weights_for_sampler", {"model_id": run.model_id, "seq_id": seq, **body}).json()["request_id"]
        failed = post(live_server, "/retrieve_future", {"request_id": future}).json()
        assert (failed["category"], f"`{field}`" in failed["error"] or "kind" in failed["error"]) == ("user", True)


# Publishing and copying


@pytest.mark.contract("POST /api/v1/training_runs/{run_id}/checkpoints/{folder}/{name}/publish")
@pytest.mark.contract("DELETE /api/v1/training_runs/{run_id}/checkpoints/{folder}/{name}/publish")
def test_published_weights_are_read_by_other_projects(
    trained: tinker.TrainingClient, rest: tinker.RestClient, their_client: tinker.ServiceClient, live_server: LiveServer, stranger: str
) -> None:
    state, weights = trained.save_state("public").result().path, trained.save_weights_for_sampler("public").result().path
    theirs = rest_of(live_server, stranger)

    def reads() -> list[object]:
        return [
            theirs.get_weights_info_by_tinker_path(state).result().lora_rank,
            loss(their_client.create_training_client_from_state(state).result(), TOKENS),
            their_client.create_sampling_client(model_path=weights).result().compute_logprobs(PROMPT).result(),
        ]

    with pytest.raises(tinker.NotFoundError):
        reads()
    for path in (state, weights):
        rest.publish_checkpoint_from_tinker_path(path).result()
        rest.publish_checkpoint_from_tinker_path(path).result()
    own = trained.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()
    assert reads() == [4, loss(trained, TOKENS), own]
    assert {each.tinker_path for each in rest.list_checkpoints(trained.model_id).result().checkpoints if each.public} == {state, weights}
    # Reading is all that they may do.
    for refused in (
        lambda: theirs.delete_checkpoint_from_tinker_path(state).result(),
        lambda: theirs.unpublish_checkpoint_from_tinker_path(state).result(),
        lambda: theirs.set_checkpoint_ttl_from_tinker_path(state, 3600).result(),
        lambda: theirs.get_training_run(trained.model_id).result(),
    ):
        with pytest.raises(tinker.NotFoundError):
            refused()
    assert state not in {each.tinker_path for each in theirs.list_user_checkpoints().result().checkpoints}
    for path in (state, weights):
        rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        reads()


def test_a_checkpoint_that_takes_the_name_of_a_published_one_is_not_published(trained: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = trained.save_state("shared").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    trained.save_state("shared", overwrite=True).result()
    (found,) = [each for each in rest.list_checkpoints(trained.model_id).result().checkpoints if each.tinker_path == path]
    assert not found.public


@pytest.mark.contract("POST /api/v1/copy_weights", "source_path", "destination_project_id", "ttl_seconds")
def test_a_copy_outlives_the_original_and_is_not_trained(
    client: tinker.ServiceClient, trained: tinker.TrainingClient, rest: tinker.RestClient, live_server: LiveServer
) -> None:
    expected = loss(trained, TOKENS)
    state = trained.save_state("to-copy", user_metadata={"note": "x"}).result().path
    copied = rest.copy_weights(state, "default", ttl_seconds=7200).result()
    assert copied != state
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert loss(client.create_training_client_from_state_with_optimizer(copied).result(), TOKENS) == expected
    run = rest.get_training_run_by_tinker_path(copied).result()
    assert (run.user_metadata, run.last_checkpoint.user_metadata) == ({"renderer_name": "chatml"}, {"note": "x"})
    assert run.last_checkpoint.expires_at is not None
    step = post(live_server, "/optim_step", {"model_id": run.training_run_id, "seq_id": 1, "adam_params": {}})
    assert (step.status_code, "only holds a copy" in step.json()["error"]) == (400, True)
    session = rest.get_session(run.training_run_id.partition(":")[0]).result()
    assert session.training_run_ids == [run.training_run_id]


@pytest.mark.contract("POST /api/v1/copy_weights", "session_id", "model_seq_id", "x-idempotency-key")
def test_a_copy_goes_where_it_is_asked_to_once(live_server: LiveServer, client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    weights = trained.save_weights_for_sampler("to-slot").result().path
    session = client.holder.get_session_id()
    body = {"source_path": weights, "session_id": session, "model_seq_id": 800}
    copies = [post(live_server, "/copy_weights", body).json()["tinker_path"] for _ in range(2)]
    assert copies == [f"tinker://{session}:train:800/sampler_weights/to-slot"] * 2
    sampled = [client.create_sampling_client(model_path=path).result().compute_logprobs(PROMPT).result() for path in (weights, copies[0])]
    assert sampled[0] == sampled[1]
    headers = {"x-api-key": live_server.key, "x-idempotency-key": "once"}
    repeated = [
        httpx.post(f"{live_server.url}/api/v1/copy_weights", json={"source_path": weights, "destination_project_id": "default"}, headers=headers)
        for _ in range(2)
    ]
    assert repeated[0].json() == repeated[1].json()
    own_slot = int(trained.model_id.rpartition(":")[2])
    refused = [{"session_id": session}, {"session_id": session, "model_seq_id": own_slot}, {}, {"session_id": session, "destination_project_id": "x"}]
    fields = [
        (answer.status_code, answer.json()["field"])
        for answer in (post(live_server, "/copy_weights", {"source_path": weights, **to}) for to in refused)
    ]
    assert fields == [(400, "destination_project_id"), (400, "model_seq_id"), (400, "destination_project_id"), (400, "destination_project_id")]
    taken = {"session_id": session, "model_seq_id": 800, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert (answer := post(live_server, "/create_model", taken)).status_code == 400, answer.text


@pytest.mark.contract("POST /api/v1/copy_weights", "x-tinker-weights-access-token", "weights_access_token")
@pytest.mark.contract("POST /api/v1/load_weights", "weights_access_token")
def test_weights_are_copied_between_projects_by_who_may(
    live_server: LiveServer, trained: tinker.TrainingClient, rest: tinker.RestClient, their_client: tinker.ServiceClient, stranger: str
) -> None:
    state, theirs = trained.save_state("to-others").result().path, rest_of(live_server, stranger)
    expected = loss(trained, TOKENS)
    with pytest.raises(tinker.NotFoundError):
        theirs.copy_weights(state, "elsewhere").result()
    with pytest.raises(tinker.BadRequestError, match="weights_access_token"):
        theirs.copy_weights(state, "elsewhere", weights_access_token="tml-wrong").result()
    lent = new_key(live_server, "default", "lent", ["read"])
    pulled = theirs.copy_weights(state, "elsewhere", weights_access_token=lent).result()
    # The SDK sends the token as a header.
    body = {"source_path": state, "destination_project_id": "elsewhere", "weights_access_token": lent}
    also_pulled = post(live_server, "/copy_weights", body, key=stranger).json()["tinker_path"]
    loaded = their_client.create_training_client_from_state(state, weights_access_token=lent).result()
    # An administrator of the server hands out what is his.
    pushed = rest.copy_weights(state, "elsewhere").result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    public = theirs.copy_weights(state, "elsewhere").result()
    rest.delete_checkpoint_from_tinker_path(state).result()
    for path in (pulled, also_pulled, pushed, public):
        run = their_client.create_training_client_from_state(path).result()
        assert loss(run, TOKENS) == expected
        assert theirs.get_training_run_by_tinker_path(path).result().user_metadata == {}
    assert loss(loaded, TOKENS) == expected
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(pulled).result()
    with pytest.raises(tinker.PermissionDeniedError):
        theirs.copy_weights(pulled, "default").result()
    with pytest.raises(tinker.NotFoundError, match="no project `nowhere`"):
        rest.copy_weights(trained.save_state("to-nobody").result().path, "nowhere").result()


# Sessions


@pytest.mark.contract(
    "POST /api/v1/sessions/search",
    "session_id",
    "user_metadata",
    "display_name",
    "owner.type",
    "owner.owner_urns",
    "statuses.type",
    "statuses.reasons",
    "limit",
    "cursor.last_created_at",
    "cursor.last_session_id",
    "project_ids",
)
@pytest.mark.contract("POST /api/v1/sessions/search", "project_ids", refused="other projects than the key's")
@pytest.mark.contract("POST /api/v1/sessions/{session_id}/finish", "reason.type")
def test_sessions_are_found_by_name_metadata_and_status(live_server: LiveServer, client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    session_id = client.holder.get_session_id()
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    run.save_state("counted").result()
    for number in range(3):
        with connected(live_server, display_name=f"sweep {number}") as each:
            each.holder.get_session_id()

    def search(**wanted: object) -> list[tinker.types.SessionSummary]:
        found, request = [], types.SessionSearchRequest(limit=2, **wanted)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                page = rest.search_sessions(request).result()
            found += page.sessions
            if page.next_cursor is None:
                return found
            request = request.model_copy(update={"cursor": page.next_cursor})

    (mine,) = search(display_name="RUN nightly")
    assert (mine.session_id, mine.display_name, mine.project_id) == (session_id, "Nightly rest run", "default")
    assert (mine.owner, mine.user_metadata, mine.status.type) == ("tml:organization_user:default", {"purpose": "rest"}, "active")
    assert mine.checkpoints_count >= 1
    assert mine.checkpoint_storage_bytes > 0
    sweeps = search(display_name="sweep", statuses=[{"type": "client_finished", "reasons": ["success"]}])
    assert [each.display_name for each in sweeps] == ["sweep 2", "sweep 1", "sweep 0"]
    assert {each.status.reason.type for each in sweeps} == {"success"}
    assert [each.session_id for each in search(session_id=session_id)] == [session_id]
    assert len(search(session_id=session_id, display_name="sweep")) == 4
    assert search(user_metadata={"purpose": "rest"}, statuses=[{"type": "active"}])[0].session_id == session_id
    assert search(display_name="sweep", statuses=[{"type": "active"}, {"type": "failed"}, {"type": "cancelled"}]) == []
    assert search(display_name="sweep", owner=types.UserSearchOwner(owner_urns=["tml:organization_user:elsewhere"])) == []
    assert len(search(display_name="sweep", owner=types.AccessibleSearchOwner(), project_ids=["default"])) == 3
    with pytest.raises(tinker.BadRequestError, match="project_id"):
        search(project_ids=["elsewhere"])


@pytest.mark.contract(
    "GET /api/v1/sessions", "access_scope", ignored="a key sees its project, so that what it owns and what it can reach are the same"
)
@pytest.mark.contract(
    "GET /api/v1/sessions/{session_id}", "access_scope", ignored="a key sees its project, so that what it owns and what it can reach are the same"
)
@pytest.mark.contract("PUT /api/v1/sessions/{session_id}/project", "project_id")
@pytest.mark.contract("PUT /api/v1/sessions/{session_id}/project", "project_id", refused="another project than the key's")
def test_sessions_are_listed_and_stay_in_their_project(rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    session_id = client.holder.get_session_id()
    assert session_id in rest.list_sessions(limit=100, access_scope="accessible").result().sessions
    session = rest.get_session(session_id, access_scope="accessible").result()
    assert (session.user_metadata, session.display_name) == ({"purpose": "rest"}, "Nightly rest run")
    rest.assign_session_project(session_id, "default").result()
    with pytest.raises(tinker.PermissionDeniedError, match="stays in the project"):
        rest.assign_session_project(session_id, "elsewhere").result()
    with pytest.raises(tinker.BadRequestError, match=r"not offer.*traces"):
        rest.export_session_trace(session_id).result()


# Administration


@pytest.mark.contract("GET /api/v1/audit")
@pytest.mark.contract("GET /api/v1/audit", "event_type", "day")
def test_the_audit_log_says_who_shared_what(live_server: LiveServer, rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    path = trained.save_state("audited").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    admin = tinker.AdminClient(base_url=live_server.url, api_key=live_server.key)
    entries = admin.get_audit_log("checkpoints").result().entries
    assert {entry.event.partition("_")[0] for entry in entries} == {"checkpoint"}
    assert [entry.event_details["path"] for entry in entries if entry.event == "checkpoint_published"][-1] == path
    assert admin.get_audit_log(day=datetime.now(UTC).date() - timedelta(days=30)).result().entries == []
    reader = new_key(live_server, "default", "auditor", ["read"])
    with pytest.raises(tinker.PermissionDeniedError):
        tinker.AdminClient(base_url=live_server.url, api_key=reader).get_audit_log().result()


@pytest.mark.contract("GET /api/v1/billing/usage/checkpoints/current")
def test_storage_is_added_up_and_nothing_is_billed(live_server: LiveServer, client: tinker.ServiceClient, trained: tinker.TrainingClient) -> None:
    trained.save_state("stored").result()
    admin = tinker.AdminClient(base_url=live_server.url, api_key=live_server.key)
    (item,) = admin.get_current_checkpoint_storage_usage().result().data
    assert (item.project_id, item.estimated_monthly_cost_usd) == ("default", None)
    assert item.checkpoint_count >= 1
    assert item.size_bytes > 1000
    with pytest.raises(tinker.BadRequestError, match="nothing is billed"):
        admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z").result()


# All parameters


@pytest.mark.contract("POST /api/v1/get_info", "model_id")
@pytest.mark.contract("POST /api/v1/save_weights_external", "model_id", "seq_id", "path")
def test_a_run_without_an_adapter_trains_all_parameters_and_is_exported_as_a_model(
    live_server: LiveServer, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    new = {"session_id": client.holder.get_session_id(), "model_seq_id": 750, "base_model": MODEL}
    model_id = post(live_server, "/create_model", new).json()["model_id"]
    assert model_id == f"{new['session_id']}:train:750"
    info = post(live_server, "/get_info", {"model_id": model_id}).json()
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    run = rest.get_training_run(model_id).result()
    assert (run.is_lora, run.lora_rank) == (False, None)
    future = post(live_server, "/save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "whole"}).json()["request_id"]
    wait_until(lambda: post(live_server, "/retrieve_future", {"request_id": future}).status_code == 200)
    path = post(live_server, "/retrieve_future", {"request_id": future}).json()["path"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= rest.get_external_weights_urls(path).result().urls.keys()
    assert rest.get_weights_info_by_tinker_path(path).result().is_lora is False
