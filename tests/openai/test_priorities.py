"""Whose request it is, which decides who goes first where a process is shared: said by the name that was asked for, and by the contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.services.weights.target import Target
from bloomery.types.generation import Weights
from bloomery.types.protocol import EngineStatus
from tests.live import wait_until
from tests.openai.server import ScriptedServer
from tests.openai.test_contract import USER
from tests.services.fake_engine import BASE

DOORS = {"/v1/chat/completions": {"messages": USER}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ScriptedServer]:
    """A server of its own: what is deployed is looked at by others."""
    server = ScriptedServer(tmp_path)
    with server.running():
        yield server


@pytest.mark.parametrize(
    ("key", "deployment", "priority"),
    [(None, None, "production"), (None, "served", "production"), ("k", "served", "production"), ("k", None, "evaluation")],
)
def test_people_are_served_by_what_is_deployed_and_by_base_models(key: str | None, deployment: str | None, priority: str) -> None:
    revision = None if deployment is None else 1
    assert Target(Weights(version="v", key=key), BASE, deployment, revision, "name").priority == priority


def test_each_door_says_whose_request_it_is(own: ScriptedServer) -> None:
    expected: dict[int, str] = {}
    with own.client() as client:
        version = client.create_run("tiny", 4).save_snapshot("judged").result().version
        client.deployments.create("served", version)
        for model, priority in (("tiny", "production"), ("served", "production"), (version, "evaluation")):
            for path, body in DOORS.items():
                seed = 1000 + len(expected)
                expected[seed] = priority
                answer = own.http.post(path, json={"model": model, "seed": seed, **body})
                assert answer.status_code == 200, answer.text
            assert own.http.post("/v1/embeddings", json={"model": model, "input": "x"}).status_code == 200
        for model in ("tiny", version):
            for drafts in (None, [[7]]):
                seed = 1000 + len(expected)
                expected[seed] = "rollout"
                client.sampler(model).sample([1, 2], max_tokens=2, seed=seed, drafts=drafts).result()
    asked = own.scripted.requests
    assert {request.params.seed: request.priority for request in asked if request.params.seed in expected} == expected
    assert [request.priority for request in asked if request.embed] == ["production", "production", "evaluation"]


def test_the_status_says_how_many_wait_of_each_class(server: ScriptedServer) -> None:
    waiting = {"rollout": 3, "evaluation": 1}
    status = EngineStatus(
        running_sequences=0, waiting_sequences=4, queued_operations=0, tokens_sampled=0, tokens_trained=0, waiting_by_priority=waiting
    )

    async def say() -> None:
        server.engine._post(status)

    server.call(say())
    wait_until(lambda: server.http.get("/api/v1/status").json()["engines"][0]["detail"].get("waiting_by_priority") == waiting)


def test_more_than_may_ever_wait_of_a_class_is_no_full_queue_and_is_not_asked_for(own: ScriptedServer) -> None:
    """Who is told to come again would do so for nothing; of what nobody waits for half as many may wait."""
    with own.client() as client:
        version = client.create_run("tiny", 4).save_snapshot("judged").result().version
    own.services.meters.max_waiting = 8
    for model, most in (("tiny", 8), (version, 4)):
        for field, asked in (
            ("prompt", {"prompt": ["x"] * (most + 1)}),
            ("n", {"prompt": ["x"] * 2, "n": most // 2 + 1}),
            ("best_of", {"prompt": ["x"] * 2, "best_of": most // 2 + 1}),
        ):
            refused = own.http.post("/v1/completions", json={"model": model, **asked})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert f"at most {most} may wait here: ask for fewer at a time" in refused.json()["error"]["message"]
        assert own.scripted.requests == []
        fits = own.http.post("/v1/completions", json={"model": model, "prompt": ["x"] * 2, "n": most // 2})
        assert (fits.status_code, len(fits.json()["choices"])) == (200, most)
        vectors = own.http.post("/v1/embeddings", json={"model": model, "input": ["x"] * (4 * most)})
        assert (vectors.status_code, len(vectors.json()["data"])) == (200, 4 * most)
        own.scripted.requests.clear()
