"""Two unmodified clients with keys of two projects on one server: neither can see, use or change what the other has."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import tinker
from tinker import types

from bloomery.client import Client
from bloomery.types.keys import NewKey
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served

ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints([1, 2])


class Tenant(NamedTuple):
    """One project's client, and what it has."""

    key: str
    client: tinker.ServiceClient
    run: tinker.TrainingClient
    saved: str
    published: str
    sampler: tinker.SamplingClient

    @property
    def session(self) -> str:
        """Of the client."""
        found: str = self.client.holder.get_session_id()
        return found

    @property
    def sampler_id(self) -> str:
        """Of its sampling client."""
        found: str = self.sampler._sampling_session_id
        return found


@pytest.fixture(scope="module")
def admin(server: Served) -> Iterator[Client]:
    with Client(server.url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def ours(server: Served, admin: Client) -> Iterator[Tenant]:
    yield from tenant(server, admin.keys.create("worker", ["train", "infer"], project="blue").key)


@pytest.fixture(scope="module")
def theirs(server: Served, admin: Client) -> Iterator[Tenant]:
    yield from tenant(server, admin.keys.create("worker", ["train", "infer"], project="red").key)


def tenant(server: Served, key: str) -> Iterator[Tenant]:
    with connected(server, key=key) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        run.forward_backward([datum()], "cross_entropy")
        run.optim_step(ADAM)
        saved = run.save_state("kept").result().path
        published = run.save_weights_for_sampler("served").result().path
        sampler = client.create_sampling_client(model_path=published).result()
        assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result().sequences
        yield Tenant(key, client, run, saved, published, sampler)


def datum() -> types.Datum:
    return types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]})


def rest(server: Served, key: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=key)


def ask(server: Served, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, f"{server.url}/api/v1{path}", json=body, headers={"x-api-key": key})


def test_a_key_that_trains_and_infers_is_all_that_a_client_needs(ours: Tenant) -> None:
    resumed = ours.client.create_training_client_from_state_with_optimizer(ours.saved).result()
    assert resumed.forward([datum()], "cross_entropy").result().metrics == ours.run.forward([datum()], "cross_entropy").result().metrics
    assert resumed.get_info().lora_rank == 4
    sampler = resumed.save_weights_and_get_sampling_client().result()
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result().sequences
    assert ours.sampler.get_base_model() == MODEL


def test_a_client_lists_what_its_project_has_and_nothing_else(server: Served, ours: Tenant, theirs: Tenant) -> None:
    mine = rest(server, ours.key)
    runs = {run.training_run_id for run in mine.list_training_runs(limit=100).result().training_runs}
    assert ours.run.model_id in runs
    assert theirs.run.model_id not in runs
    paths = {checkpoint.tinker_path for checkpoint in mine.list_user_checkpoints().result().checkpoints}
    assert {ours.saved, ours.published} <= paths
    assert not {theirs.saved, theirs.published} & paths
    sessions = mine.list_sessions().result().sessions
    assert ours.session in sessions
    assert theirs.session not in sessions


def test_what_belongs_to_another_project_is_not_found(server: Served, ours: Tenant, theirs: Tenant) -> None:
    mine = rest(server, ours.key)
    for attempt in (
        lambda: mine.get_training_run(theirs.run.model_id),
        lambda: mine.get_training_run_by_tinker_path(theirs.saved),
        lambda: mine.list_checkpoints(theirs.run.model_id),
        lambda: mine.get_weights_info_by_tinker_path(theirs.saved),
        lambda: mine.delete_checkpoint_from_tinker_path(theirs.saved),
        lambda: mine.set_checkpoint_ttl_from_tinker_path(theirs.saved, 1),
        lambda: mine.publish_checkpoint_from_tinker_path(theirs.saved),
        lambda: mine.unpublish_checkpoint_from_tinker_path(theirs.saved),
        lambda: mine.get_session(theirs.session),
        lambda: mine.get_sampler(theirs.sampler_id),
        lambda: ours.client.create_training_client_from_state(theirs.saved),
        lambda: ours.client.create_training_client_from_state_with_optimizer(theirs.saved),
        lambda: ours.client.create_sampling_client(model_path=theirs.published),
    ):
        with pytest.raises(tinker.NotFoundError):
            attempt().result()


def test_a_run_does_not_load_the_weights_of_another_project(ours: Tenant, theirs: Tenant) -> None:
    fresh = ours.client.create_lora_training_client(base_model=MODEL, rank=4).result()
    with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match="has no weights `kept`") as refused:
        fresh.load_state(theirs.saved).result()
    assert refused.value.category is types.RequestErrorCategory.User


def test_requests_in_another_projects_names_change_nothing(server: Served, ours: Tenant, theirs: Tenant) -> None:
    before = len(server.engine.executed)
    run, session = theirs.run.model_id, theirs.session
    new = {"session_id": session, "model_seq_id": 7, "base_model": MODEL, "lora_config": {"rank": 4}}
    sample = {"sampling_session_id": theirs.sampler_id, "seq_id": 50, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1}}
    for path, body in (
        ("/get_info", {"model_id": run}),
        ("/optim_step", {"model_id": run, "seq_id": 5, "adam_params": {}}),
        ("/optim_step", {"model_id": run, "seq_id": 5, "adam_params": {"nonsense": 1}}),
        ("/save_weights", {"model_id": run, "seq_id": 5, "path": "x"}),
        ("/save_weights_for_sampler", {"model_id": run, "seq_id": 5, "path": "x"}),
        ("/load_weights", {"model_id": run, "seq_id": 5, "path": ours.saved, "optimizer": True}),
        ("/create_model", new),
        ("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 7, "base_model": MODEL}),
        ("/asample", sample),
        ("/session_heartbeat", {"session_id": session}),
        (f"/sessions/{session}/finish", {"reason": {"type": "success"}}),
    ):
        answer = ask(server, ours.key, "POST", path, body)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), (path, answer.text)
    assert len(server.engine.executed) == before
    assert ask(server, theirs.key, "POST", "/session_heartbeat", {"session_id": session}).status_code == 200
    theirs.run.optim_step(ADAM).result()


def test_futures_of_another_project_are_not_found(server: Served, ours: Tenant, theirs: Tenant) -> None:
    operation, creation = f"operation|{theirs.run.model_id}|1|", f"create|{theirs.run.model_id}"
    sample = ask(server, theirs.key, "POST", "/asample", asked_of(theirs, 60, first_token=1)).json()["request_id"]
    missing = ask(server, theirs.key, "POST", "/retrieve_future", {"request_id": f"{sample}9"})
    for name, expected in ((operation, (404, "not_found")), (creation, (404, "not_found")), (sample, (missing.status_code, missing.json()["code"]))):
        assert ask(server, theirs.key, "POST", "/retrieve_future", {"request_id": name}).status_code == 200
        answer = ask(server, ours.key, "POST", "/retrieve_future", {"request_id": name})
        assert (answer.status_code, answer.json()["code"]) == expected, name
    assert (missing.status_code, missing.json()["code"]) == (410, "gone")


def test_a_sample_in_the_making_is_cancelled_by_its_project_alone(server: Served, ours: Tenant, theirs: Tenant) -> None:
    endless = ask(server, theirs.key, "POST", "/asample", asked_of(theirs, 61, first_token=0)).json()["request_id"]
    assert ask(server, ours.key, "POST", "/cancel_future", {"request_id": endless}).status_code == 410
    assert ask(server, theirs.key, "POST", "/cancel_future", {"request_id": endless}).status_code == 200


@pytest.mark.parametrize("scopes", [["read"], ["train"], ["read", "train", "deploy", "admin"]])
def test_samples_are_fetched_and_cancelled_with_the_scope_that_samples(server: Served, admin: Client, ours: Tenant, scopes: list[str]) -> None:
    """Of its own project even: a key that looks or trains is no key that samples."""
    made = admin.keys.create(f"fetcher-{len(scopes)}-{scopes[0]}", scopes, project="blue").key
    done = ask(server, ours.key, "POST", "/asample", asked_of(ours, 70, first_token=1)).json()["request_id"]
    target = {"type": "sampling_session", "sampling_session_id": ours.sampler_id, "cloned_sampler_id": 0}
    for path, body in (
        ("/retrieve_future", {"request_id": done}),
        ("/cancel_future", {"request_id": done}),
        ("/retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0, "retrieved_request_ids": []}),
    ):
        answer = ask(server, made, "POST", path, body)
        assert (answer.status_code, answer.json()["code"], answer.json()["category"]) == (403, "forbidden", "user"), path
        assert "lacks the scope `infer`" in answer.json()["error"]
        assert ask(server, ours.key, "POST", path, body).status_code == 200, path


@pytest.mark.parametrize("scope", ["read", "train"])
def test_results_of_operations_are_fetched_without_the_scope_that_samples(server: Served, admin: Client, ours: Tenant, scope: str) -> None:
    made = admin.keys.create(f"watcher-{scope}", [scope], project="blue").key
    assert ask(server, made, "POST", "/retrieve_future", {"request_id": f"operation|{ours.run.model_id}|1|"}).status_code == 200


@pytest.mark.parametrize("scope", ["infer", "read", "deploy", "admin"])
def test_a_scope_that_is_missing_is_named(server: Served, admin: Client, ours: Tenant, scope: str) -> None:
    made: NewKey = admin.keys.create(f"only-{scope}", [scope], project="blue")
    step = {"model_id": ours.run.model_id, "seq_id": 90, "adam_params": {}}
    answer = ask(server, made.key, "POST", "/optim_step", step)
    assert (answer.status_code, answer.json()["code"], answer.json()["category"]) == (403, "forbidden", "user")
    assert "lacks the scope `train`" in answer.json()["error"]
    if scope != "infer":
        with pytest.raises(tinker.PermissionDeniedError, match="`train` or `infer`"):
            tinker.ServiceClient(base_url=server.url, api_key=made.key).create_sampling_client(base_model=MODEL).result()


def test_a_client_whose_key_is_revoked_is_stopped_at_once(server: Served, admin: Client) -> None:
    key = admin.keys.create("short-lived", ["train", "infer"], project="blue").key
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    assert run.forward([datum()], "cross_entropy").result().metrics
    admin.keys.revoke("short-lived", project="blue")
    for attempt in (lambda: run.forward([datum()], "cross_entropy"), lambda: rest(server, key).list_training_runs(), lambda: client.close("success")):
        with pytest.raises(tinker.AuthenticationError, match="revoked"):
            attempt().result()


def asked_of(tenant: Tenant, seq: int, *, first_token: int) -> dict[str, Any]:
    """A sampling request; one that begins with token 0 never ends."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [first_token]}]}
    return {"sampling_session_id": tenant.sampler_id, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
