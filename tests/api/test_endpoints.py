"""Models elsewhere as judges, over HTTP to the real services; the endpoint is a real server that speaks OpenAI's contract."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.config import EndpointConfig
from bloomery.types.resources import Price
from tests.api.server import URL, Server, serving
from tests.outside import KEY, Outside, outside


def says(body: dict[str, Any]) -> Any:
    """What the output asks for: `refuse 503`, `talk`, or a verdict of 0.75."""
    asked = str(body["messages"][-1]["content"])
    if asked.startswith("refuse "):
        return int(asked.removeprefix("refuse "))
    if asked == "together":
        together.wait(120)
    return "no verdict" if asked == "talk" else {"steps": [{"description": "d", "conclusion": "c"}], "result": 0.75}


together = threading.Barrier(2)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Outside]:
    with outside(says) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, elsewhere: Outside) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    (directory / "key").write_text(f"{KEY}\n")
    (directory / "wrong").write_text("sk-other")
    endpoints = (
        EndpointConfig(
            name="elsewhere",
            base_url=elsewhere.url,
            key_file=str(directory / "key"),
            models={"vendor/judge:free": Price(prompt_usd_per_mtok=2.0, completion_usd_per_mtok=8.0), "vectors": None},
            concurrency=2,
        ),
        EndpointConfig(name="keyless", base_url=elsewhere.url, key_file=str(directory / "wrong")),
        EndpointConfig(name="away", base_url="http://127.0.0.1:9/v1"),
        EndpointConfig(name="theirs", base_url=elsewhere.url, projects=("shop",)),
    )
    with serving(directory, endpoints=endpoints) as running:
        yield running


def judge(model: str) -> dict[str, Any]:
    return {"type": "score_model", "name": "j", "model": model, "input": [{"role": "user", "content": "{{ sample.output_text }}"}]}


def graded(server: Server, spec: dict[str, Any], *outputs: str, key: str | None = None) -> httpx.Response:
    name = f"g-{abs(hash(str(spec)))}"
    assert server.http.post("/api/v1/graders", json={"name": name, "spec": spec}).is_success
    body = {"rows": [{"output": output} for output in outputs]}
    return server.http.post(f"/api/v1/graders/{name}/run", json=body, headers={} if key is None else {"x-api-key": key})


def test_a_judge_elsewhere_is_asked_by_endpoint_and_model(server: Server, elsewhere: Outside) -> None:
    (result,) = graded(server, judge("elsewhere:vendor/judge:free"), "fine").json()["results"]
    assert (result["score"], result["reason"], result["usage"]) == (0.75, "d: c", {"prompt_tokens": 100, "completion_tokens": 10})
    assert elsewhere.asked[-1]["model"] == "vendor/judge:free"
    assert elsewhere.asked[-1]["response_format"]["type"] == "json_schema"


def test_the_version_of_a_judge_covers_endpoint_and_model(server: Server) -> None:
    made = [
        server.http.post("/api/v1/graders", json={"name": "versioned", "spec": judge(model)}).json()
        for model in ("elsewhere:vendor/judge:free", "keyless:vendor/judge:free", "elsewhere:vectors")
    ]
    assert len({each["judges"]["j"] for each in made}) == 3
    assert made[0]["models"] == ["elsewhere:vendor/judge:free"]


def test_vectors_come_from_elsewhere_too(server: Server) -> None:
    spec = {"type": "text_similarity", "input": "{{ sample.output_text }}", "reference": "abc", "evaluation_metric": "cosine"}
    (result,) = graded(server, spec | {"embedding_model": "elsewhere:vectors"}, "xyz").json()["results"]
    assert (round(result["score"], 6), result["usage"]["prompt_tokens"]) == (1.0, 6)


def test_no_more_questions_are_in_hand_than_the_endpoint_takes(server: Server, elsewhere: Outside) -> None:
    results = graded(server, judge("elsewhere:vendor/judge:free"), *["together"] * 8).json()["results"]
    assert [result["score"] for result in results] == [0.75] * 8
    assert elsewhere.busiest == 2


@pytest.mark.parametrize(
    ("model", "output", "kind", "words"),
    [
        ("elsewhere:vendor/judge:free", "refuse 400", "no_score", "127.0.0.1 answers 400"),
        ("elsewhere:vendor/judge:free", "talk", "no_score", "not JSON"),
        ("elsewhere:vendor/judge:free", "refuse 503", "unavailable", "127.0.0.1 answers 503"),
        ("keyless:any", "x", "unavailable", "endpoint `keyless` does not take the key of this server"),
        ("away:any", "x", "unavailable", "127.0.0.1 does not answer"),
    ],
)
def test_who_is_away_or_refuses_is_named_and_never_a_score_of_0(server: Server, model: str, output: str, kind: str, words: str) -> None:
    answer = graded(server, judge(model), output)
    (result,) = answer.json()["results"]
    assert (result["score"], result["error"]["kind"]) == (None, kind)
    assert words in result["error"]["detail"]
    assert "sk-" not in answer.text


@pytest.mark.parametrize("model", ["elsewhere:unlisted", "elsewhere:", "nowhere:m", "theirs:m"])
def test_what_the_project_may_not_ask_is_not_there(server: Server, model: str) -> None:
    answer = graded(server, judge(model), "x")
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "model")


def test_keys_that_only_ask_spend_nothing_elsewhere(server: Server) -> None:
    asks = server.http.post("/api/v1/keys", json={"name": "asks", "scopes": ["infer"]}).json()["key"]
    answer = graded(server, judge("elsewhere:vendor/judge:free"), "x", key=asks)
    assert (answer.status_code, "`train`" in answer.json()["error"]["message"]) == (403, True)


def test_endpoints_are_listed_to_their_projects_without_keys(server: Server, elsewhere: Outside) -> None:
    answer = server.http.get("/api/v1/endpoints")
    assert [each["name"] for each in answer.json()["data"]] == ["elsewhere", "keyless", "away"]
    assert "key" not in answer.json()["data"][0]
    assert KEY not in answer.text
    with server.client() as client:
        first = client.endpoints()[0]
    assert first.base_url == elsewhere.url
    assert first.models is not None
    assert first.models["vectors"] is None
    price = first.models["vendor/judge:free"]
    assert price is not None
    assert (price.prompt_usd_per_mtok, price.completion_usd_per_mtok) == (2.0, 8.0)


def test_what_is_asked_elsewhere_counts_on_the_key(server: Server) -> None:
    made = {"name": "bounded", "scopes": ["infer", "train"], "tokens_per_minute": 150}
    key = server.http.post("/api/v1/keys", json=made).json()["key"]
    spec = judge("elsewhere:vendor/judge:free")
    assert graded(server, spec, "one", key=key).json()["results"][0]["score"] == 0.75
    with httpx.Client(base_url=URL, headers={"x-api-key": key}, transport=server.transport) as http:
        told = http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * 60, "max_tokens": 1})
    assert told.status_code == 429, told.text


def test_nothing_of_a_key_is_in_rows_or_logs(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    graded(server, judge("elsewhere:vendor/judge:free"), "fine")
    graded(server, judge("keyless:any"), "x")
    stored = b"".join(path.read_bytes() for path in Path(server.config.data_dir).rglob("bloomery.db*"))
    assert b"sk-secret" not in stored
    assert b"sk-other" not in stored
    assert "sk-" not in caplog.text
