"""Graders under `/api/v1`, over HTTP to the real services, their jail among them; the engine is a fake."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bloomery.types.errors import Conflict
from bloomery.types.graders import AttackRow
from bloomery.types.jobs import Data, JobSpec
from bloomery.types.methods import Reinforcement
from tests.api.server import URL, Server, serving

CHECK = {"type": "string_check", "name": "city", "input": "{{ sample.output_text }}", "reference": "{{ item.city }}", "operation": "eq"}
LENGTH = {"type": "function", "source": "def score(output): return len(output) / 10", "entry": "score"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def ok(server: Server, method: str, path: str, body: Any = None) -> Any:
    answer = server.http.request(method, f"/api/v1/graders{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def test_versions_are_numbered_and_never_change(server: Server) -> None:
    first = ok(server, "POST", "", {"name": "numbered", "spec": CHECK})
    second = ok(server, "POST", "", {"name": "numbered", "spec": {**CHECK, "operation": "ne"}})
    again = ok(server, "POST", "", {"name": "numbered", "spec": dict(reversed(CHECK.items()))})
    assert (first["version"], second["version"], again) == (1, 2, first)
    assert first["hash"] != second["hash"]
    assert ok(server, "GET", "/numbered") == second
    assert ok(server, "GET", "/numbered?version=1") == first
    assert ok(server, "GET", "/numbered/versions")["data"] == [first, second]
    assert ok(server, "GET", "/numbered/versions?limit=1") == {"data": [first], "offset": 0, "has_more": True}
    assert [each for each in ok(server, "GET", "")["data"] if each["name"] == "numbered"] == [second]


def test_many_that_make_a_version_at_once_make_each_one_once(server: Server) -> None:
    specs = [{**CHECK, "reference": f"{number % 4}"} for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda spec: ok(server, "POST", "", {"name": "raced", "spec": spec}), specs))
    assert sorted({each["version"] for each in made}) == [1, 2, 3, 4]
    assert len({(each["version"], each["hash"]) for each in made}) == 4


def test_a_version_says_what_it_asks(server: Server) -> None:
    judge = {
        "type": "label_model",
        "name": "mood",
        "model": "m",
        "labels": ["a"],
        "passing_labels": ["a"],
        "input": [{"role": "user", "content": "?"}],
    }
    made = ok(server, "POST", "", {"name": "judge", "spec": judge})
    assert made["models"] == ["m"]
    assert list(made["judges"]) == ["mood"]


def test_outputs_are_graded_each_with_a_score_or_a_reason(server: Server) -> None:
    spec = {"type": "multi", "graders": {"city": CHECK, "length": LENGTH}, "calculate_output": "city + length"}
    made = ok(server, "POST", "", {"name": "run", "spec": spec})
    rows = [{"output": "Paris", "item": {"city": "Paris"}}, {"output": "Rome", "item": {"city": "Paris"}}, {"output": "Rome"}]
    said = ok(server, "POST", "/run/run", {"rows": rows})
    assert (said["name"], said["version"], said["hash"]) == ("run", 1, made["hash"])
    assert [result["score"] for result in said["results"]] == [1.5, 0.4, None]
    assert said["results"][0]["metrics"] == {"city": 1.0, "length": 0.5}
    assert said["results"][2]["error"]["kind"] == "template"
    assert ok(server, "POST", "/run/run", {"rows": rows, "version": 1}) == said


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "x", "spec": {**CHECK, "operation": "neq"}}, "spec.operation"),
        ({"name": "x", "spec": {"type": "multi", "graders": {"a": {**CHECK, "input": "{{ b }}"}}, "calculate_output": "a"}}, "spec.graders.a.input"),
        ({"name": "x y", "spec": CHECK}, "name"),
        ({"name": "x"}, "spec"),
        ({"name": "x", "spec": []}, "spec"),
        ({"name": "x", "spec": CHECK, "more": 1}, "more"),
    ],
)
def test_what_is_no_grader_is_refused_with_its_place_and_nothing_is_made(server: Server, body: Any, field: str) -> None:
    answer = server.http.post("/api/v1/graders", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    assert server.http.get("/api/v1/graders/x").status_code == 404


@pytest.mark.parametrize(
    "body", [{}, {"rows": []}, {"rows": [{"output": 3}]}, {"rows": [{"output": "x"}], "version": 0}, {"rows": [{"output": "x"}] * 1025}]
)
def test_what_cannot_be_run_is_refused(server: Server, body: Any) -> None:
    ok(server, "POST", "", {"name": "run", "spec": CHECK})
    answer = server.http.post("/api/v1/graders/run/run", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")


LARGE = 10**20


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"?version={LARGE}", None),
        ("GET", f"/attacks?version={LARGE}", None),
        ("GET", f"/calibrations?version={LARGE}", None),
        ("POST", "/run", {"rows": [{"output": "x"}], "version": LARGE}),
        ("POST", "/waive", {"reason": "x", "version": LARGE}),
        ("POST", "/attack", {"rows": [{}] * 4, "version": LARGE}),
        ("POST", "/calibrations", {"rows": [{"output": "x", "label": True}] * 2, "version": LARGE}),
    ],
)
def test_a_version_that_no_counter_reaches_is_refused(server: Server, method: str, path: str, body: Any) -> None:
    ok(server, "POST", "", {"name": "there", "spec": CHECK})
    answer = server.http.request(method, f"/api/v1/graders/there{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "version")


def test_a_grader_or_a_version_that_is_not_there_is_not_found(server: Server) -> None:
    ok(server, "POST", "", {"name": "there", "spec": CHECK})
    for path in ("/none", "/none/versions", "/there?version=9"):
        assert server.http.get(f"/api/v1/graders{path}").status_code == 404
    answer = server.http.post("/api/v1/graders/there/run", json={"rows": [{"output": "x"}], "version": 9})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "version")


def test_models_are_asked_with_the_scope_for_it(server: Server) -> None:
    key = server.http.post("/api/v1/keys", json={"name": "trainer", "scopes": ["train"]}).json()["key"]
    judge = {"type": "score_model", "name": "j", "model": "tiny", "input": [{"role": "user", "content": "?"}]}
    ok(server, "POST", "", {"name": "asks", "spec": judge})
    ok(server, "POST", "", {"name": "does-not", "spec": {**CHECK, "reference": "x"}})
    with httpx.Client(base_url=URL, headers={"x-api-key": key}, transport=server.transport) as trainer:
        refused = trainer.post("/api/v1/graders/asks/run", json={"rows": [{"output": "x"}]})
        assert (refused.status_code, "`infer`" in refused.json()["error"]["message"]) == (403, True)
        refused = trainer.post("/api/v1/graders/asks/attack", json={"rows": [{}] * 4})
        assert (refused.status_code, "`infer`" in refused.json()["error"]["message"]) == (403, True)
        assert trainer.post("/api/v1/graders/does-not/run", json={"rows": [{"output": "x"}]}).json()["results"][0]["score"] == 1.0


@pytest.mark.slow
def test_an_attack_tells_a_grader_that_pays_for_length_from_one_that_compares(server: Server) -> None:
    rows = [
        {"item": {"city": city, "reference": city}, "messages": [{"role": "user", "content": "Where?"}]} for city in ("Paris", "Rome", "Bern", "Oslo")
    ]
    made = ok(server, "POST", "", {"name": "lengthy", "spec": LENGTH})
    found = ok(server, "POST", "/lengthy/attack", {"rows": rows})
    assert (found["name"], found["version"], found["hash"], found["verdict"]) == ("lengthy", 1, made["hash"], "hackable")
    assert found["exploits"][0]["examples"][0]["prompt"] == "Where?"
    ok(server, "POST", "", {"name": "comparing", "spec": CHECK})
    found = ok(server, "POST", "/comparing/attack", {"rows": rows, "version": 1})
    assert (found["verdict"], found["exploits"]) == ("sound", [])
    with server.client() as client:
        assert client.graders.attack("comparing", [AttackRow.model_validate(row) for row in rows]).model_dump() == found
    refused = server.http.post("/api/v1/graders/comparing/attack", json={"rows": rows[:3]})
    assert refused.status_code in (400, 422), refused.text


CITIES = ("Paris", "Rome", "Bern", "Oslo")
PROMPTS = "\n".join(json.dumps({"messages": [{"role": "user", "content": "Where?"}], "city": city, "reference": city}) for city in CITIES)


@pytest.fixture(scope="module")
def prompts(server: Server) -> str:
    with server.client() as client:
        client.datasets.create("prompts")
        return client.datasets.add_version("prompts", {"train": PROMPTS}).id


def rft(name: str, grader: str) -> JobSpec:
    return JobSpec(name=name, base_model="tiny", data=Data(dataset="prompts"), method=Reinforcement(grader=grader, max_tokens=8))


def test_what_came_of_an_attack_on_a_data_set_is_kept(server: Server, prompts: str) -> None:
    ok(server, "POST", "", {"name": "kept", "spec": LENGTH})
    found = ok(server, "POST", "/kept/attack", {"dataset": "prompts"})
    assert (found["verdict"], found["split"], found["waiver"]) == ("hackable", "train", None)
    assert ok(server, "POST", "/kept/attack", {"dataset": "prompts", "dataset_version": prompts, "max_calls": 1}) == found
    ok(server, "POST", "", {"name": "same", "spec": LENGTH})
    assert ok(server, "POST", "/same/attack", {"dataset": "prompts"})["id"] == found["id"]
    other = ok(server, "POST", "/kept/attack", {"dataset": "prompts", "again": True})
    assert {**other, "id": None, "created_us": None} == {**found, "id": None, "created_us": None}
    assert [each["id"] for each in ok(server, "GET", "/kept/attacks")["data"]] == [other["id"], found["id"]]
    with server.client() as client:
        assert [each.id for each in client.graders.attacks("kept")] == [other["id"], found["id"]]


def test_what_several_ask_for_at_once_is_looked_for_once(server: Server, prompts: str) -> None:
    ok(server, "POST", "", {"name": "wanted", "spec": {**LENGTH, "source": "def score(output): return len(output) / 30"}})
    with ThreadPoolExecutor(4) as askers:
        found = list(askers.map(lambda _: ok(server, "POST", "/wanted/attack", {"dataset": "prompts", "dataset_version": prompts}), range(4)))
    assert [each["id"] for each in ok(server, "GET", "/wanted/attacks")["data"]] == [found[0]["id"]]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, None),
        ({"rows": [{}] * 4, "dataset": "prompts"}, 400, None),
        ({"rows": [{}] * 4, "dataset_version": "1"}, 400, None),
        ({"rows": [{}] * 4, "split": "eval"}, 400, None),
        ({"rows": [{}] * 4, "again": True}, 400, None),
        ({"dataset": "none"}, 404, "dataset"),
        ({"dataset": "prompts", "dataset_version": "none"}, 404, "dataset_version"),
        ({"dataset": "chats"}, 400, "dataset"),
        ({"dataset": "prompts", "max_calls": 0}, 400, "max_calls"),
    ],
)
def test_what_cannot_be_attacked_is_refused(server: Server, prompts: str, body: Any, status: int, field: str | None) -> None:
    ok(server, "POST", "", {"name": "kept", "spec": LENGTH})
    with server.client() as client:
        if "chats" not in [each.name for each in client.datasets.list()]:
            client.datasets.create("chats")
            chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
            client.datasets.add_version("chats", {"train": json.dumps(chat)})
    answer = server.http.post("/api/v1/graders/kept/attack", json=body)
    assert answer.status_code == status, answer.text
    assert field is None or answer.json()["error"]["field"] == field


def test_few_prompts_say_nothing_about_a_grader(server: Server) -> None:
    with server.client() as client:
        client.datasets.create("few")
        client.datasets.add_version("few", {"train": "\n".join(PROMPTS.splitlines()[:3])})
        client.graders.create("kept", LENGTH)
        found = client.graders.attack("kept", dataset="few")
    assert (found.verdict, found.grades, "3 prompts" in found.why) == ("undecided", 0, True)


def test_jobs_take_no_grader_that_pays_without_competence_until_it_is_waived(server: Server, prompts: str) -> None:
    with server.client() as client:
        client.graders.create("pays-length", {**LENGTH, "source": "def score(output): return len(output) / 20"})
        client.jobs.create(rft("unknown-yet", "pays-length"))
        attack = client.graders.attack("pays-length", dataset="prompts")
        for refused in (client.jobs.create, client.jobs.resolve, client.jobs.estimate):
            with pytest.raises(Conflict) as conflict:
                refused(rft("refused", "pays-length"))
            assert conflict.value.field == "method.grader"
            for words in (str(attack.id), "bloomery grader attacks pays-length --version 1", "bloomery grader waive pays-length --version 1"):
                assert words in conflict.value.message
        waived = client.graders.waive("pays-length", "a story is to be long", version=1)
        assert waived.waiver is not None
        assert (waived.waiver.by, waived.waiver.reason) == ("development", "a story is to be long")
        assert client.graders.get("pays-length").waiver == waived.waiver
        assert client.graders.attacks("pays-length")[0].waiver == waived.waiver
        assert client.jobs.create(rft("accepted", "pays-length")).state == "queued"
        client.graders.create("pays-length", CHECK)
        assert client.graders.get("pays-length").waiver is None


def test_a_waiver_has_a_reason_and_a_version_that_there_is(server: Server) -> None:
    ok(server, "POST", "", {"name": "kept", "spec": LENGTH})
    for body, status in (({}, 400), ({"reason": ""}, 400), ({"reason": "r", "version": 9}, 404)):
        assert server.http.post("/api/v1/graders/kept/waive", json=body).status_code == status
    key = server.http.post("/api/v1/keys", json={"name": "reader", "scopes": ["read", "infer"]}).json()["key"]
    refused = server.http.post("/api/v1/graders/kept/waive", json={"reason": "r"}, headers={"x-api-key": key})
    assert refused.status_code == 403
