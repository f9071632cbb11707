"""Answers that were served are scored by a grader as evaluations and rewards are, each once, over the real api."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes.online import score_served
from bloomery.types.errors import NotFound
from tests.live import wait_until
from tests.openai.server import Script, ScriptedServer

CHECK = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "{{ item.wanted }}", "operation": "eq"}
ASKED = [{"role": "user", "content": "Is it?"}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path).listening() as server:
        server.scripted.script = Script(says=("yes",))
        server.client().deployments.create("front", "tiny")
        yield server


def served(client: Client, model: str, count: int = 1, **options: object) -> list[str]:
    known = len(client.spans.list())
    made = [client.chat(model, ASKED, **options)["id"] for _ in range(count)]
    wait_until(lambda: len(client.spans.list()) == known + count)
    return made


def test_what_was_served_is_scored_once_and_keeps_its_scores_as_feedback(server: ScriptedServer) -> None:
    client = server.client()
    client.graders.create("right", CHECK)
    (good,), (bad,) = served(client, "front", metadata={"wanted": "yes"}), served(client, "front", metadata={"wanted": "no"})
    (nothing,), (several,) = served(client, "front"), served(client, "front", n=2, metadata={"wanted": "yes"})
    (other,) = served(client, "tiny", metadata={"wanted": "yes"})
    found = {online.span: online for online in score_served(client, "right", deployment="front")}
    assert found.keys() == {good, bad, nothing}
    assert (found[good].result.score, found[bad].result.score, found[good].model) == (1.0, 0.0, "front")
    # A row that lacks what the grader asks for is a failure, and no zero.
    assert found[nothing].result.error is not None
    assert found[nothing].result.error.kind == "template"
    feedback = {span: [(each.metric, each.value, each.source) for each in client.spans.get(span).feedback] for span in (good, bad, nothing, several)}
    assert feedback == {good: [("right@1", 1.0, "code")], bad: [("right@1", 0.0, "code")], nothing: [], several: []}
    assert [online.span for online in score_served(client, "right")] == [other, nothing]
    assert [online.span for online in score_served(client, "right")] == [nothing]
    client.graders.create("right", {**CHECK, "operation": "ne"})
    assert [online.result.score for online in score_served(client, "right", limit=1)] == [0.0]
    assert {each.metric: each.value for each in client.spans.get(other).feedback} == {"right@1": 1.0, "right@2": 0.0}
    assert client.spans.get(good).feedback[0].metric == "right@1"


def test_a_judge_sees_the_conversation_and_its_reason_is_kept(server: ScriptedServer) -> None:
    client = server.client()
    seen = {"type": "function", "source": "def score(output, messages): return {'score': len(messages), 'reason': output}", "entry": "score"}
    client.graders.create("seen", seen)
    (span,) = served(client, "front")
    (online,) = score_served(client, "seen")
    assert online.result.score == 1.0
    server.scripted.script = Script(says=('{"steps": [], "result": 0.5}',))
    client.graders.create("judge", {"type": "score_model", "model": "front", "input": [{"role": "user", "content": "{{ sample.output_text }}?"}]})
    (online,) = score_served(client, "judge")
    assert online.result.score == 0.5
    assert {(each.metric, each.source, each.comment) for each in client.spans.get(span).feedback} >= {("seen@1", "code", "yes")}
    assert [each.source for each in client.spans.get(span).feedback if each.metric == "judge@1"] == ["judge"]


def test_a_grader_that_is_not_there_is_not_found(server: ScriptedServer) -> None:
    with pytest.raises(NotFound):
        score_served(server.client(), "none")
