"""Requests under /api/v1 that change something, sent again under their `Idempotency-Key`: over HTTP, to the real services; the engine is a fake."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.api.server import Server, serving
from tests.services.stage import chat

ROOT = Path(__file__).parent.parent.parent
LINES = "\n".join(json.dumps({"text": text, "label": "x"}) for text in ("one row", "another one"))
ROWS = {"format": "jsonl", "splits": {"train": LINES}}


CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "yes", "operation": "eq"}


class Post(NamedTuple):
    """A request that changes something: the body, another body that is as good, and the status of the answer."""

    path: str
    body: dict[str, Any]
    other: dict[str, Any]
    status: int = 201


POSTS = {
    "deploy": Post("/deployments", {"name": "fresh", "version": "tiny"}, {"name": "fresher", "version": "tiny"}),
    "promote": Post("/deployments/router/promote", {"version": "tiny"}, {"version": "tiny", "evidence": {"why": "not"}}, 200),
    "roll back": Post("/deployments/router/rollback", {"revision": 1}, {"revision": 2}, 200),
    "judge": Post("/feedback", {"target": "span", "metric": "m", "value": True}, {"target": "span", "metric": "m", "value": False}),
    "create a data set": Post("/datasets", {"name": "fresh"}, {"name": "fresher"}),
    "import": Post("/datasets/data/versions", ROWS, {**ROWS, "splits": {"train": LINES.replace("row", "line")}}),
    "make a grader": Post("/graders", {"name": "g", "spec": CHECK}, {"name": "g", "spec": {**CHECK, "operation": "ne"}}),
    "curate": Post("/datasets/data/curate", {"parent": "VERSION"}, {"parent": "VERSION", "metric": "m"}),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def populate(server: Server) -> str:
    """A deployment that can be moved, a data set, and an answer to judge; the version of the data set."""
    done(server, "/deployments", {"name": "router", "version": "tiny"})
    done(server, "/deployments/router/promote", {"version": "tiny"})
    done(server, "/datasets", {"name": "data"})

    async def record() -> None:
        server.services.traffic.record(chat("span"))

    server.call(record())
    return str(done(server, "/datasets/data/versions", {"format": "jsonl", "splits": {"eval": '{"text": "held out", "label": "x"}'}})["id"])


def post(server: Server, path: str, body: Any, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return server.http.post(f"/api/v1{path}", json=body, headers=headers, **options)


def done(server: Server, path: str, body: Any, key: str | None = None) -> Any:
    answer = post(server, path, body, key)
    assert answer.is_success, answer.text
    return answer.json()


def revisions(server: Server) -> int:
    return len(server.http.get("/api/v1/deployments/router").json()["revisions"])


@pytest.mark.slow
@pytest.mark.parametrize("what", POSTS)
def test_a_repetition_changes_nothing_and_is_answered_what_the_first_was(server: Server, what: str) -> None:
    path, body, other, status = POSTS[what]
    version = populate(server)
    body, other = ({name: version if value == "VERSION" else value for name, value in each.items()} for each in (body, other))
    first = post(server, path, body, "mine")
    assert (first.status_code, "idempotent-replayed" in first.headers) == (status, False), first.text
    before = everything(server)
    again = post(server, path, body, "mine")
    server.stop()
    server.start()
    after_a_death = post(server, path, body, "mine")
    for repeated in (again, after_a_death):
        assert (repeated.status_code, settled(repeated.json())) == (status, settled(first.json()))
        assert repeated.headers["idempotent-replayed"] == "true"
        assert repeated.headers["x-request-id"] != first.headers["x-request-id"]
    refused = post(server, path, other, "mine")
    assert (refused.status_code, refused.json()["error"]["code"], refused.json()["error"]["field"]) == (409, "conflict", "idempotency-key")
    assert everything(server) == before
    fresh = post(server, path, other, "fresh")
    assert (fresh.status_code, "idempotent-replayed" in fresh.headers) == (status, False), fresh.text


def everything(server: Server) -> list[Any]:
    paths = ("runs", "deployments", "deployments/router", "feedback", "datasets", "datasets/data")
    return [settled(server.http.get(f"/api/v1/{path}").json()) for path in paths]


def settled(answer: Any) -> Any:
    """Without what the server finds out by and by of what is deployed, and shows as it is now."""
    if isinstance(answer, dict):
        return {name: settled(value) for name, value in answer.items() if name not in ("fidelity", "proved")}
    return [settled(each) for each in answer] if isinstance(answer, list) else answer


def test_a_key_belongs_to_one_path_one_query_the_same_headers_and_one_caller(server: Server) -> None:
    populate(server)
    promote = {"version": "tiny"}
    done(server, "/deployments/router/promote", promote, "mine")
    asked = "/deployments/router/promote"
    for path, more in (("/deployments/other/promote", {}), (f"{asked}?beta=true", {}), (asked, {"x-bloomery-episode": "e"})):
        refused = server.http.post(f"/api/v1{path}", json=promote, headers={"Idempotency-Key": "mine", **more})
        assert (refused.status_code, refused.json()["error"]["field"]) == (409, "idempotency-key")
        assert "one body and the same `x-bloomery-` headers, take a fresh one" in refused.json()["error"]["message"]
    theirs = done(server, "/keys", {"name": "stranger", "scopes": ["deploy", "read"]})["key"]
    answer = server.http.post("/api/v1/deployments/router/promote", json=promote, headers={"x-api-key": theirs, "Idempotency-Key": "mine"})
    assert (answer.status_code, "idempotent-replayed" in answer.headers, revisions(server)) == (200, False, 4)


def test_a_key_has_1_to_255_characters(server: Server) -> None:
    for key in ("", "k" * 256):
        refused = post(server, "/datasets", {"name": "fresh"}, key)
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "idempotency-key")
    assert post(server, "/datasets", {"name": "fresh"}, "k" * 255).status_code == 201


def test_what_failed_is_carried_out_when_it_comes_again(server: Server) -> None:
    promote = {"version": "tiny"}
    assert post(server, "/deployments/router/promote", promote, "mine").status_code == 404
    done(server, "/deployments", {"name": "router", "version": "tiny"})
    assert post(server, "/deployments/router/promote", promote, "mine").status_code == 200
    assert revisions(server) == 2


def test_of_many_that_come_at_once_one_is_carried_out_and_all_have_its_answer(server: Server) -> None:
    populate(server)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(server, "/deployments/router/promote", {"version": "tiny"}, "mine"), range(8)))
    assert {answer.text for answer in answers} == {answers[0].text}
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False] + [True] * 7
    assert revisions(server) == 3


def test_a_repetition_is_answered_though_what_it_names_is_gone(server: Server, tmp_path: Path) -> None:
    made = done(server, "/deployments", {"name": "router", "version": "tiny"}, "mine")
    done(server, "/deployments/router/promote", {"version": "tiny"})
    # What lists the name now would refuse to make it, and show two revisions.
    again = done(server, "/deployments", {"name": "router", "version": "tiny"}, "mine")
    # Its card may have been measured meanwhile, and is shown once it is there.
    assert {**again, "fidelity": None} == {**made, "fidelity": None}
    assert revisions(server) == 2


def test_a_key_that_was_made_is_not_shown_again(server: Server, tmp_path: Path) -> None:
    wanted = {"name": "program", "scopes": ["read"]}
    secret = done(server, "/keys", wanted, "mine")["key"]
    for _ in range(2):
        refused = post(server, "/keys", wanted, "mine")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["field"]) == (409, "conflict", "idempotency-key")
        assert "key `program` of project `default` was made when this request came before, and its secret is shown once" in error["message"]
        assert "revoke it and make another, with a fresh `idempotency-key`" in error["message"]
        assert server.http.delete("/api/v1/keys/program").is_success
        assert post(server, "/keys", wanted, "mine").status_code == 409
        done(server, "/keys", wanted)
    other = post(server, "/keys", wanted | {"scopes": ["train"]}, "mine")
    assert "was used for another request" in other.json()["error"]["message"]
    with sqlite3.connect(tmp_path / "bloomery.db") as database:
        dump = "\n".join(database.iterdump())
    assert "program" in dump
    assert secret not in dump


def test_keys_of_runs_count_within_a_project_whatever_was_asked_for_with_them_elsewhere(server: Server) -> None:
    body = {"base_model": "tiny", "rank": 4}
    made = done(server, "/runs", body, "mine")
    assert done(server, "/runs?beta=true", body, "mine")["id"] == made["id"]
    done(server, "/datasets", {"name": "fresh"}, "mine")
    colleague = done(server, "/keys", {"name": "colleague", "scopes": ["train"]})["key"]
    answer = server.http.post("/api/v1/runs", json=body, headers={"x-api-key": colleague, "Idempotency-Key": "mine", "x-bloomery-episode": "e"})
    assert (answer.status_code, answer.json()["id"]) == (201, made["id"])


def test_a_run_has_one_key_whichever_header_it_comes_in(server: Server) -> None:
    body = {"base_model": "tiny", "rank": 4}
    made = done(server, "/runs", body, "mine")
    again = post(server, "/runs", {"alpha": 32.0, **body}, "mine")
    assert (again.status_code, again.json()["id"], again.headers["idempotent-replayed"]) == (201, made["id"], "true")
    assert server.http.post("/api/v1/runs", json=body, headers={"x-idempotency-key": "mine"}).json()["id"] == made["id"]
    both = server.http.post("/api/v1/runs", json=body, headers={"x-idempotency-key": "mine", "idempotency-key": "mine"})
    assert (both.status_code, both.json()["id"], both.headers["idempotent-replayed"]) == (201, made["id"], "true")
    refused = post(server, "/runs", body | {"rank": 8}, "mine")
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "idempotency-key")
    both = server.http.post("/api/v1/runs", json=body, headers={"x-idempotency-key": "mine", "idempotency-key": "another"})
    assert (both.status_code, both.json()["error"]["field"]) == (400, "idempotency-key")


PROMOTE_AND_DIE = """
import sys
from pathlib import Path
from bloomery.obs import failpoints
from tests.api.server import serving
from tests.api.test_repeats import done

with serving(Path(sys.argv[1])) as server:
    done(server, "/deployments", {"name": "router", "version": "tiny"})
    failpoints._armed |= failpoints._parse("store.row.committed")
    done(server, "/deployments/router/promote", {"version": "tiny"}, "mine")
"""


@pytest.mark.slow
def test_a_server_that_was_killed_before_it_could_answer_carries_nothing_out_twice(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROMOTE_AND_DIE, str(tmp_path)]
    child = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with serving(tmp_path) as server:
        assert revisions(server) == 2
        answer = post(server, "/deployments/router/promote", {"version": "tiny"}, "mine")
        assert (answer.status_code, answer.headers["idempotent-replayed"], answer.json()["live"]["number"]) == (200, "true", 2)
        assert revisions(server) == 2
