"""Evaluations under `/api/v1`, over the real services with their jail and an engine that says what a test wants to hear."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, event

from bloomery import config
from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.grade.declared import parse_spec
from bloomery.services.evaluations import paired, running
from bloomery.services.evaluations.evaluation_rows import put_answer, put_scores
from bloomery.services.grading.graders import Graders, Tried
from bloomery.types.errors import BloomeryError, Conflict, InvalidInput, NotFound
from bloomery.types.evaluations import Answered, Evaluation, EvaluationSpec, EvaluationState
from bloomery.types.grading import GradeResult
from bloomery.types.resources import Price
from bloomery.types.statistics import sign_test
from tests.live import wait_until
from tests.openai.server import Script, ScriptedServer
from tests.outside import KEY, outside

CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}", "operation": "eq"}
ROWS = [{"messages": [{"role": "user", "content": f"What is {number}?"}], "answer": "yes" if number % 2 else "no"} for number in range(8)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("server")).listening() as server:
        client = server.client()
        add_rows(client, "asked", ROWS)
        client.graders.create("right", CHECK)
        client.deployments.create("front", "tiny")
        client.graders.create("column", {**CHECK, "reference": "{{ item.city }}"})
        client.graders.create("strange-judge", {"type": "score_model", "model": "away", "input": [{"role": "user", "content": "?"}]})
        add_rows(client, "many", [{"messages": [{"role": "user", "content": f"{place:x}" * 4}], "answer": "yes"} for place in range(1600)])
        add_rows(client, "pairs", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
        yield server


@pytest.fixture
def server(shared: ScriptedServer) -> ScriptedServer:
    shared.scripted.script = Script(says=("yes",))
    return shared


@pytest.fixture
def client(server: ScriptedServer) -> Client:
    return server.client()


def add_rows(client: Client, name: str, rows: list[Any]) -> None:
    client.datasets.create(name)
    client.datasets.add_version(name, {"eval": "\n".join(map(json.dumps, rows))})


def spec(name: str, **changes: Any) -> EvaluationSpec:
    given: dict[str, Any] = {"name": name, "data": {"dataset": "asked"}, "models": ["tiny"], "graders": ["right"]}
    return EvaluationSpec.model_validate(given | changes)


def ended(client: Client, evaluation: Evaluation) -> Evaluation:
    wait_until(lambda: client.evaluations.get(evaluation.id).state.ended)
    return client.evaluations.get(evaluation.id)


def done(client: Client, name: str, **changes: Any) -> Evaluation:
    found = ended(client, client.evaluations.create(spec(name, **changes)))
    assert found.state is EvaluationState.SUCCEEDED, found.reason
    return found


def test_every_row_is_asked_and_graded_and_the_figures_follow_from_it(client: Client, server: ScriptedServer) -> None:
    found = done(client, "figures", models=["tiny", {"model": "front", "price": {"prompt_usd_per_mtok": 1e6, "completion_usd_per_mtok": 2e6}}])
    assert (found.rows, found.spec.graders[0].label, found.spec.data.version is None) == (8, "right@1", False)
    assert found.progress.model_dump() == {"answers": 16, "answered": 16, "scores": 16, "scored": 16}
    assert found.result is not None
    own, priced = found.result.models
    assert (own.answers, own.failed, own.usd_per_1000, own.version) == (8, 0, 0.0, found.versions[0])
    assert priced.usd_per_1000 == pytest.approx(1000 * (priced.prompt_tokens + 2 * priced.completion_tokens) / 8)
    assert own.latency_p50_s is not None
    assert own.latency_p95_s is not None
    assert own.latency_p50_s <= own.latency_p95_s
    (graded,) = own.graders
    assert graded.mean is not None
    assert graded.passed is not None
    assert (graded.mean.value, graded.passed.value, graded.invalid, graded.rows) == (0.5, 0.5, 0, 8)
    (pair,) = found.result.differences
    assert pair.difference is not None
    assert (pair.model, pair.other, pair.rows, pair.ties, pair.difference.value) == ("tiny", "front", 8, 8, 0.0)
    assert {request.priority for request in server.scripted.requests} == {"evaluation"}


def test_a_deployment_is_as_dear_in_an_evaluation_as_its_price_says(client: Client) -> None:
    client.deployments.create("dear", "tiny")
    try:
        client.deployments.set_price("dear", Price(prompt_usd_per_mtok=1e6, completion_usd_per_mtok=0.0))
        found = done(
            client, "dear-figures", models=["dear", {"model": "tiny", "price": {"prompt_usd_per_mtok": 0.0, "completion_usd_per_mtok": 1e6}}]
        )
    finally:
        client.deployments.set_price("dear", None)
    assert found.spec.models[0].price == Price(prompt_usd_per_mtok=1e6, completion_usd_per_mtok=0.0)
    assert found.result is not None
    dear, own = found.result.models
    assert (dear.usd_per_1000, own.usd_per_1000) == (1000 * dear.prompt_tokens / 8, 1000 * own.completion_tokens / 8)


def test_two_models_are_compared_row_by_row_by_the_server(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(says=("yes",))
    yes = done(client, "paired-yes", models=["tiny", "front"], graders=["right"])
    server.scripted.script = Script(says=("no",))
    done(client, "paired-no", models=["tiny"], graders=["right"], params={"samples": 2})
    alike = client.evaluations.pairs("paired-yes", other="front")
    assert (alike.rows, alike.ties, alike.p_value, alike.test, alike.unscored) == (8, 8, 1.0, "mcnemar", 0)
    assert (alike.first.model, alike.other and alike.other.model, alike.grader) == ("tiny", "front", "right@1")
    found = client.evaluations.pairs(yes.id, against="paired-no", limit=3)
    assert (found.rows, found.wins, found.losses, found.interval) == (8, 4, 4, "bonett_price")
    assert found.difference is not None
    assert found.difference.interval is not None
    assert found.difference.interval[0] < 0 == found.difference.value < found.difference.interval[1]
    assert ([abs(row.difference or 0) for row in found.data], found.has_more, found.shown) == ([1, 1, 1], True, 8)
    better = client.evaluations.pairs(yes.id, against="paired-no", show="better")
    assert [(row.score, row.other_score, row.difference) for row in better.data] == [(1.0, 0.0, 1.0)] * 4
    assert [len(row.other_numbers) for row in better.data] == [2] * 4
    numbers = {item.number: item for item in client.evaluations.items(yes.id)}
    assert all(numbers[row.numbers[0]].row == row.row and row.asked in str(numbers[row.numbers[0]].messages) for row in better.data)
    assert [row.row for row in client.evaluations.pairs(yes.id, against="paired-no", order="row", offset=6).data] == [6, 7]
    assert [row.difference for row in client.evaluations.pairs(yes.id, against="paired-no", order="worse").data] == [-1.0] * 4 + [1.0] * 4
    alone = client.evaluations.pairs(yes.id, model="front", order="worse")
    assert (alone.other, alone.difference, [row.score for row in alone.data]) == (None, None, [0.0] * 4 + [1.0] * 4)


@contextmanager
def scores_read() -> Iterator[list[str]]:
    """Statements that read answers with their scores, within its `with`."""
    found: list[str] = []

    def note(_1: Any, _2: Any, statement: str, *_: Any) -> None:
        if "LEFT OUTER JOIN evaluation_score" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_pages_of_one_comparison_are_of_scores_that_are_read_once(client: Client) -> None:
    done(client, "paged", models=["tiny", "front"], graders=["right"])
    with scores_read() as read:
        pages = [client.evaluations.pairs("paged", other="front", order="row", limit=3, offset=offset) for offset in (0, 3, 6)]
        assert [row.row for page in pages for row in page.data] == list(range(8))
        assert ([page.has_more for page in pages], {page.shown for page in pages}) == ([True, True, False], {8})
        assert len(read) == 2
        assert client.evaluations.pairs("paged", order="worse").data[0].score == 0.0
        assert client.evaluations.pairs("paged", other="front", show="worse").shown == 0
        assert len(read) == 5
        client.evaluations.delete("paged")
        with pytest.raises(NotFound):
            client.evaluations.pairs("paged", other="front", order="row", limit=3)
        done(client, "paged", models=["front", "tiny"], graders=["right"])
        assert client.evaluations.pairs("paged", other="tiny", order="row", limit=3).first.model == "front"
        assert len(read) == 7


def test_rows_that_one_evaluation_has_alone_are_told_with_what_was_asked(
    client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "yes"}
    asked = [*[row["messages"] for row in ROWS[:3]], [{"role": "user", "content": "Call it"}, {"role": "assistant", "tool_calls": [called]}]]
    add_rows(client, "longer", [{"messages": [*messages, answer]} for messages in asked])
    client.graders.create("like", {**CHECK, "reference": "{{ item.reference }}"})
    done(client, "asked-two", graders=["like"], data={"dataset": "longer", "split": "eval", "rows": 2})
    done(client, "asked-all", graders=["like"], data={"dataset": "longer", "split": "eval"})

    def beside_the_loop(wins: int, losses: int) -> float:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return sign_test(wins, losses)

    monkeypatch.setattr(paired, "sign_test", beside_the_loop)
    for one, other in (("asked-two", "asked-all"), ("asked-all", "asked-two")):
        found = client.evaluations.pairs(one, against=other, order="row")
        assert [row.asked for row in found.data] == ["What is 0?", "What is 1?", "What is 2?", ""]
        assert (found.rows, found.unscored, found.p_value) == (2, 2, 1.0)


def test_what_was_asked_other_rows_or_graded_by_others_is_not_compared(client: Client) -> None:
    add_rows(client, "other-rows", ROWS[:4])
    done(client, "paired-here", models=["tiny"], graders=["right"])
    done(client, "paired-there", models=["tiny"], graders=["right"], data={"dataset": "other-rows", "split": "eval"})
    with pytest.raises(InvalidInput, match="not asked the same rows"):
        client.evaluations.pairs("paired-here", against="paired-there")
    for wrong, problem in (
        ({"model": "gone"}, "model `gone` is not in"),
        ({"grader": "gone"}, "grader `gone` is not in"),
        ({"other": "x"}, "`x` is not in"),
    ):
        with pytest.raises(NotFound, match=problem):
            client.evaluations.pairs("paired-here", **wrong)


def test_judges_of_an_evaluation_are_asked_behind_production_too(client: Client, server: ScriptedServer) -> None:
    server.scripted.requests.clear()
    server.scripted.script = Script(says=('{"steps": [], "result": "good"}',))
    judge = {
        "type": "label_model",
        "model": "front",
        "labels": ["good", "bad"],
        "passing_labels": ["good"],
        "input": [{"role": "user", "content": "?"}],
    }
    client.graders.create("judge", judge)
    found = done(client, "judged", graders=["judge"])
    assert found.result is not None
    (graded,) = found.result.models[0].graders
    assert graded.passed is not None
    assert (graded.passed.value, graded.invalid) == (1.0, 0)
    assert [request.priority for request in server.scripted.requests if request.grammar is not None] == ["evaluation"] * 8


def test_items_are_shown_page_by_page_in_the_order_of_rows(client: Client, server: ScriptedServer) -> None:
    found = done(client, "items", params={"samples": 2, "temperature": 1.0})
    items = list(client.evaluations.items(found.id))
    assert [(item.row, item.sample) for item in items] == [(row, sample) for row in range(8) for sample in range(2)]
    assert items[2].item == {"answer": "yes"}
    assert items[2].messages == ROWS[1]["messages"]
    assert (items[2].answer.text, items[2].answer.finish_reason, items[2].answer.completion_tokens) == ("yes", "stop", 4)
    assert items[2].scores[0].passed
    page = server.http.get(f"/api/v1/evaluations/{found.id}/items", params={"limit": 3, "after": 1}).json()
    assert ([item["number"] for item in page["data"]], page["has_more"]) == ([2, 3, 4], True)
    assert {item.row for item in client.evaluations.items(found.id, status="passed")} == {1, 3, 5, 7}
    assert {item.row for item in client.evaluations.items(found.id, status="failed")} == {0, 2, 4, 6}
    assert list(client.evaluations.items(found.id, status="invalid")) == []
    assert len(list(client.evaluations.items(found.id, model="tiny"))) == 16
    with pytest.raises(NotFound, match="there are `tiny`"):
        list(client.evaluations.items(found.id, model="front"))


def test_a_model_elsewhere_stands_beside_ones_own_with_its_price_or_without(tmp_path: Path) -> None:
    def says(body: dict[str, Any]) -> Any:
        number = int(body["messages"][-1]["content"].removeprefix("What is ").removesuffix("?"))
        return 400 if number == 7 else "yes" if number % 2 else "no"

    (tmp_path / "key").write_text(KEY)
    with outside(says) as elsewhere:
        server = ScriptedServer(tmp_path)
        price = Price(prompt_usd_per_mtok=2.0, completion_usd_per_mtok=8.0)
        models = {"known": price, "dear": None}
        vendor = config.EndpointConfig(name="vendor", key_file=str(tmp_path / "key"), base_url=elsewhere.url, models=models)
        server.config = replace(server.config, endpoints=(vendor,))
        with server.running():
            client = server.client()
            add_rows(client, "asked", ROWS)
            client.graders.create("right", CHECK)
            server.scripted.script = Script(says=("yes",))
            found = done(client, "beside", models=["tiny", "vendor:known", "vendor:dear"], params={"seed": 7, "temperature": 0.5})
            with pytest.raises(NotFound, match="not asked for a model `gone`") as refused:
                client.evaluations.create(spec("refused", models=["vendor:gone"]))
    assert refused.value.field == "models.0.model"
    assert found.result is not None
    own, known, dear = found.result.models
    assert (known.answers, known.failed, known.version, dear.usd_per_1000) == (7, 1, None, None)
    assert known.usd_per_1000 == pytest.approx(1000 * (100 * 2.0 + 10 * 8.0) / 1e6)
    ours = found.result.differences[0]
    assert (ours.model, ours.other, ours.rows, ours.losses) == ("tiny", "vendor:known", 7, 4)
    assert (own.failed, known.graders[0].failures) == (0, {"no_answer": 1})
    body = next(each for each in elsewhere.asked if each["model"] == "known")
    assert (body["temperature"], body["max_completion_tokens"], "response_format" in body) == (0.5, 512, False)
    assert len({each["seed"] for each in elsewhere.asked}) == 8


def test_conversations_and_completions_are_asked_up_to_their_answer(client: Client) -> None:
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]}]
    add_rows(client, "talk", talk)
    add_rows(client, "text", [{"prompt": "b", "completion": "yes"}])
    client.graders.create("same", {**CHECK, "reference": "{{ item.reference }}"})
    for name in ("talk", "text"):
        found = done(client, name, data={"dataset": name}, graders=["same"])
        (item,) = client.evaluations.items(found.id)
        assert (item.scores[0].result.score, item.item["reference"]) == (1.0, "yes")
        assert (item.prompt, [message["content"] for message in item.messages]) == (("b", []) if name == "text" else (None, ["a"]))


def test_what_has_no_score_is_invalid_and_never_a_zero(client: Client, server: ScriptedServer) -> None:
    source = "def score(output, answer):\n    if answer == 'no':\n        raise ValueError('cannot')\n    return 1.0"
    client.graders.create("raising", {"type": "function", "source": source, "entry": "score"})
    found = done(client, "invalid", graders=["raising", "right"])
    assert found.result is not None
    raising, right = found.result.models[0].graders
    assert raising.mean is not None
    assert (raising.mean.value, raising.rows, raising.invalid, raising.invalid_rate, raising.failures) == (1.0, 4, 4, 0.5, {"raised": 4})
    assert (raising.passed, right.invalid) == (None, 0)
    assert {item.row for item in client.evaluations.items(found.id, status="invalid")} == {0, 2, 4, 6}


@pytest.mark.slow
def test_a_grader_that_hangs_is_ended_row_by_row_and_the_others_go_on(client: Client) -> None:
    source = "def score(output, answer):\n    while answer == 'no':\n        pass\n    return 1.0"
    client.graders.create("hanging", {"type": "function", "source": source, "entry": "score"})
    found = client.evaluations.create(spec("hangs", graders=["hanging", "right"], data={"dataset": "asked", "rows": 3}))
    wait_until(lambda: client.evaluations.get(found.id).state.ended)
    result = client.evaluations.get(found.id).result
    assert result is not None
    hanging, right = result.models[0].graders
    assert (hanging.failures, hanging.rows, right.rows) == ({"timeout": 2}, 1, 3)


def test_a_question_that_cannot_be_asked_is_invalid_and_the_others_count(client: Client) -> None:
    long = [{"messages": [{"role": "user", "content": "x" * length}], "answer": "yes"} for length in (1, 5000)]
    add_rows(client, "long", long)
    found = done(client, "long", data={"dataset": "long"})
    assert found.result is not None
    (model,) = found.result.models
    assert (model.answers, model.failed, model.graders[0].invalid, model.graders[0].failures) == (1, 1, 1, {"no_answer": 1})
    (item,) = client.evaluations.items(found.id, status="invalid")
    assert item.answer.error is not None
    assert (item.row, item.answer.error.kind, item.scores) == (1, "refused", [])


def test_rows_that_nobody_could_grade_are_graded_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, asked = Graders.attempt, list[int]()

    async def attempt_as_in_an_accident(self: Graders, p: Any, grader: Any, outputs: Any, **options: Any) -> Tried:
        tried = await attempt(self, p, grader, outputs, **options)
        asked.append(len(outputs))
        went_away = GradeResult.failed("unavailable", "the fork server of graders went away")
        lost = [each._replace(result=went_away) if place < 3 and len(asked) == 1 else each for place, each in enumerate(tried.graded)]
        return tried._replace(graded=lost)

    monkeypatch.setattr(Graders, "attempt", attempt_as_in_an_accident)
    found = done(client, "accident")
    assert found.result is not None
    assert found.result.models[0].graders[0].failures == {}
    # Those alone that came to nothing.
    assert sum(asked) == len(ROWS) + min(3, asked[0])


def test_where_no_model_answers_the_evaluation_has_failed(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(refuses="prompt")
    found = ended(client, client.evaluations.create(spec("mute")))
    assert found.state is EvaluationState.FAILED
    assert found.reason == "no model gave any answer: refused: `prompt` is too much"


def test_what_is_not_done_in_time_has_failed(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(says=("yes",), stall_after=1)
    found = ended(client, client.evaluations.create(spec("late", deadline_s=0.2)))
    assert (found.state, found.reason) == (EvaluationState.FAILED, "it was not done within 0.2 s: raise `deadline_s`")


def test_one_that_is_cancelled_stops_asking_and_can_be_deleted(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(says=("yes",), stall_after=1)
    made = client.evaluations.create(spec("cancelled"))
    wait_until(lambda: client.evaluations.get(made.id).state is EvaluationState.RUNNING)
    with pytest.raises(Conflict, match="cancel it first"):
        client.evaluations.delete(made.id)
    assert client.evaluations.cancel("cancelled").state is EvaluationState.CANCELLED
    with pytest.raises(Conflict, match="is cancelled, and cannot be cancelled"):
        client.evaluations.cancel("cancelled")
    client.evaluations.delete("cancelled")
    with pytest.raises(NotFound, match="no evaluation `cancelled`"):
        client.evaluations.get("cancelled")
    server.scripted.script = Script(says=("yes",))
    done(client, "cancelled")


def test_what_is_said_when_one_has_ended_is_not_kept(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(says=("yes",), stall_after=1)
    made, database = client.evaluations.create(spec("forgotten")), server.services.files._database
    wait_until(lambda: client.evaluations.get(made.id).state is EvaluationState.RUNNING)
    client.evaluations.cancel(made.id)
    client.evaluations.delete(made.id)
    said = GradeResult(score=1.0)
    for late in (
        lambda connection: put_answer(connection, "default", made.id, 0, Answered(text="late")),
        lambda connection: put_scores(connection, "default", made.id, 0, parse_spec(CHECK), [(0, said)]),
    ):
        with pytest.raises(Conflict, match="has ended"):
            server.call(database.write(late))


def test_those_of_one_project_keep_no_other_project_waiting(client: Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "AT_ONCE", 1)
    key = client.keys.create("other-evaluations", ["read", "train", "infer"], project="other-evaluations").key
    other = Client("http://server", key, transport=server.transport)
    add_rows(other, "asked", ROWS)
    other.graders.create("right", CHECK)
    server.scripted.script = Script(says=("yes",), stall_after=1)
    before = len(server.scripted.requests)
    long = [client.evaluations.create(spec(f"long-{number}")) for number in range(2)]
    wait_until(lambda: len(server.scripted.requests) == before + len(ROWS))
    server.scripted.script = Script(says=("yes",))
    done(other, "short")
    assert client.evaluations.get(long[1].id).state is EvaluationState.QUEUED
    for evaluation in long:
        client.evaluations.cancel(evaluation.id)


def test_one_name_belongs_to_one_of_many_that_are_made_at_once(client: Client) -> None:
    def make(_: int) -> str | None:
        try:
            return client.evaluations.create(spec("raced")).id
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        assert sum(made is not None for made in pool.map(make, range(8))) == 1


def test_of_those_who_end_one_at_once_one_does(client: Client, server: ScriptedServer) -> None:
    server.scripted.script = Script(says=("yes",), stall_after=1)
    made, told = client.evaluations.create(spec("ended-twice")), list[str]()

    def cancel() -> None:
        try:
            told.append(client.evaluations.cancel(made.id).state)
        except Conflict:
            told.append("conflict")

    both = [threading.Thread(target=cancel) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    assert sorted(told) == ["cancelled", "conflict"]


@pytest.mark.parametrize(
    ("changes", "kind", "field", "message"),
    [
        ({"data": {"dataset": "gone"}}, NotFound, "data.dataset", "no data set `gone`"),
        ({"data": {"dataset": "asked", "version": "v"}}, NotFound, "data.version", "has no version `v`"),
        ({"data": {"dataset": "asked", "split": "train"}}, InvalidInput, "data.split", "no rows in `train`"),
        ({"graders": ["right", "gone"]}, NotFound, "graders.1", "no grader `gone`"),
        ({"graders": ["right@9"]}, NotFound, "graders.0", "no version 9"),
        ({"models": ["gone"]}, NotFound, "models.0.model", "no model `gone`"),
        ({"models": ["tiny", "tiny"]}, InvalidInput, "models", "named twice"),
        ({"params": {"samples": 64}, "data": {"dataset": "many"}}, InvalidInput, "data.rows", "102400 answers"),
        ({"graders": ["column"]}, InvalidInput, "graders.0", "leads nowhere in any row: columns of `item` are `answer`"),
        ({"graders": ["strange-judge"]}, NotFound, "graders.0", "no model `away`"),
        ({"data": {"dataset": "pairs"}}, InvalidInput, "data.dataset", "holds `preference` rows"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_asked(
    client: Client, changes: dict[str, Any], kind: type[BloomeryError], field: str, message: str
) -> None:
    with pytest.raises(kind, match=message) as refused:
        client.evaluations.create(spec("refused", **changes))
    assert refused.value.field == field


def test_a_grader_is_named_with_its_number_or_without() -> None:
    named = spec("x", graders=["right", "right@2"]).graders
    assert [(each.grader, each.version) for each in named] == [("right", None), ("right", 2)]
    for wrong in ("right@", "right@x", "right@0", "@1"):
        with pytest.raises(ValidationError):
            spec("x", graders=[wrong])


def test_the_leaderboard_has_the_newest_result_of_each_version_best_first(client: Client, server: ScriptedServer) -> None:
    add_rows(client, "ranked", [{**row, "answer": "yes"} for row in ROWS])
    on: dict[str, Any] = {"data": {"dataset": "ranked"}}
    server.scripted.script = Script(says=("neither",))
    done(client, "ranked-worst", **on)
    done(client, "ranked-hot", **on, params={"temperature": 1.0})
    server.scripted.script = Script(says=("yes",))
    done(client, "ranked-best", **on)
    done(client, "ranked-part", data={"dataset": "ranked", "rows": 2}, params={"max_tokens": 9})
    board = client.evaluations.leaderboard("ranked", "right")
    assert [(line.place, line.evaluation) for line in board.data] == [(1, "ranked-best"), (2, "ranked-hot")]
    assert (board.rows, board.grader, board.split) == (8, "right@1", "eval")
    with pytest.raises(NotFound, match="no grader `gone`"):
        client.evaluations.leaderboard("ranked", "gone")
    with pytest.raises(NotFound, match="no data set `gone`"):
        client.evaluations.leaderboard("gone", "right")


def test_an_api_that_starts_again_asks_and_grades_only_what_is_missing(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = ScriptedServer(tmp_path_factory.mktemp("again"))
    with server.running():
        client = server.client()
        add_rows(client, "asked", ROWS)
        client.graders.create("right", CHECK)
        server.scripted.script = Script(says=("yes",))
        first = done(client, "first")
        before = len(server.scripted.requests)
        server.scripted.script = Script(says=("yes",), stall_after=1)
        made = client.evaluations.create(spec("second"))
        wait_until(lambda: len(server.scripted.requests) > before)
        server.stop()
        server.scripted.script = Script(says=("no",))
        server.start()
        assert ended(client, made).state is EvaluationState.SUCCEEDED
        assert client.evaluations.get(first.id) == first
        assert {item.answer.text for item in client.evaluations.items("first")} == {"yes"}


def test_one_whose_base_is_not_served_any_more_keeps_no_other_from_being_worked_at(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "AT_ONCE", 1)
    directory = tmp_path_factory.mktemp("away")
    server = ScriptedServer(directory)
    with server.running():
        client = server.client()
        add_rows(client, "asked", ROWS)
        client.graders.create("right", CHECK)
        server.scripted.script = Script(says=("yes",), stall_after=1)
        left = client.evaluations.create(spec("left"))
        wait_until(lambda: client.evaluations.get(left.id).state is EvaluationState.RUNNING)
        server.stop()
        with closing(sqlite3.connect(DataDir(directory).database)) as database, database:
            database.execute("UPDATE evaluation_model SET base_hash = 'gone'")
        server.scripted.script = Script(says=("yes",))
        server.start()
        done(client, "next")
        assert client.evaluations.get(left.id).state is EvaluationState.RUNNING
        client.evaluations.cancel(left.id)


def test_one_whose_answers_cannot_be_counted_keeps_no_other_from_it(tmp_path: Path) -> None:
    server = ScriptedServer(tmp_path)
    with server.running(), closing(sqlite3.connect(DataDir(tmp_path).database)) as database:

        def counted() -> list[bool]:
            return [counts is not None for (counts,) in database.execute("SELECT counts FROM evaluation ORDER BY name")]

        client = server.client()
        add_rows(client, "asked", ROWS)
        client.graders.create("right", CHECK)
        for name in ("a", "b", "c"):
            done(client, name)
        wait_until(lambda: all(counted()))
        server.stop()
        with database:
            kept = database.execute("SELECT graders FROM evaluation LIMIT 1").fetchone()
            database.execute("UPDATE evaluation SET counts = NULL")
            database.execute("UPDATE evaluation SET graders = 'nonsense' WHERE name IN ('a', 'c')")
        server.start()
        wait_until(lambda: counted() == [False, True, False])
        with database:
            database.execute("UPDATE evaluation SET graders = ?", kept)
        # The next look, whatever it is for, tries again.
        done(client, "d")
        wait_until(lambda: all(counted()))
