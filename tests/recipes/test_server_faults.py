"""A server that fails in the middle of either loop, where rollouts are scored and where agents ask: the loop ends with an error of a kind before
anything is learnt, and goes on with the same groups once that is mended."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.client import Client
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.errors import BloomeryError, Forbidden, Gone, NotFound, Unauthorized, Unavailable, WorkerError
from tests.live import LiveServer
from tests.recipes.loops import PROBLEMS, Record
from tests.recipes.test_agents import once, swallowing
from tests.recipes.test_holding import ROLLOUTS, Loop, ahead, in_step

PATIENCE_S = 0.2
loops = pytest.mark.parametrize("loop", [in_step, ahead])


class ScoresNothing(httpx.BaseTransport):
    """Of a server that samples, and answers whoever has rollouts scored with this error."""

    def __init__(self, status: int, code: str, category: str) -> None:
        self._wire, self._status = httpx.HTTPTransport(), status
        self._told = {"error": "scores nothing today", "code": code, "category": category}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v1/asample" and "prompt_logprobs" in json.loads(request.read()):
            return httpx.Response(self._status, json=self._told)
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


@pytest.mark.slow
@loops
@pytest.mark.parametrize(
    ("status", "kind"), [(503, Unavailable), (500, WorkerError), (404, NotFound), (410, Gone), (403, Forbidden)], ids=lambda each: str(each)
)
def test_rollouts_that_cannot_be_scored_end_either_loop_with_the_servers_error_and_nothing_is_learnt(
    live_server: LiveServer, client: Client, tmp_path: Path, loop: Loop, status: int, kind: type[BloomeryError]
) -> None:
    path = tmp_path / "cursor"
    faulty = ScoresNothing(status, kind.code, kind.category)
    with (
        Client(live_server.url, live_server.key, transport=faulty, patience_s=PATIENCE_S) as unwell,
        pytest.raises(kind, match="scores nothing today"),
    ):
        loop(unwell, path, Record().grade, PROBLEMS)
    cursor = json.loads(path.read_text())
    assert (cursor["round"], client.run(cursor["run_id"]).next_seq) == (0, cursor["seq"])
    (report,) = loop(client, path, Record().grade, PROBLEMS)
    assert (report.step, report.metrics["agreement/held_share"]) == (1, 1)


@pytest.mark.slow
@loops
def test_a_key_that_is_revoked_in_the_middle_of_a_conversation_ends_the_loop_and_its_agent_has_no_zero(
    live_server: LiveServer, client: Client, tokenizer: ChatTokenizer, tmp_path: Path, loop: Loop
) -> None:
    name, path, revoked = f"agents-{loop.__name__}", tmp_path / "cursor", threading.Event()

    def agent(episode: Episode) -> float | None:
        once(episode)
        if not revoked.is_set():
            revoked.set()
            client.keys.revoke(name)
        return swallowing("red", "blue")(episode)

    key = client.keys.create(name, ["train", "infer", "read"]).key
    options: dict[str, Any] = {"rollouts": RolloutConfig(group_size=2, max_tokens=4), "groups_per_step": 1, "concurrency": 1}
    problems = [Problem("one", ()), Problem("two", ())]
    with Agents(agent, tokenizer) as agents:
        with Client(live_server.url, key) as doomed, pytest.raises(Unauthorized):
            loop(doomed, path, agents, problems, **options)
        assert json.loads(path.read_text())["round"] == 0
        again = client.keys.create(name, ["train", "infer", "read"]).key
        with Client(live_server.url, again) as sound:
            (report,) = loop(sound, path, agents, problems, **options)
    client.keys.revoke(name)
    assert report.metrics["reward/raw"] == 1


@loops
def test_a_key_that_may_not_sample_ends_either_loop_with_the_scope_that_it_lacks(
    live_server: LiveServer, client: Client, tmp_path: Path, loop: Loop
) -> None:
    name = f"trains-{loop.__name__}"
    key = client.keys.create(name, ["train", "read"]).key
    with Client(live_server.url, key) as trains, pytest.raises(Forbidden, match="infer"):
        loop(trains, tmp_path / "cursor", Record().grade, PROBLEMS, rollouts=replace(ROLLOUTS, attempts=1))
    client.keys.revoke(name)
