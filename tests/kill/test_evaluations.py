"""An evaluation whose api and whose engine are killed in the middle ends with the answers and the scores that it would have had, each given once."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.errors import Unavailable
from bloomery.types.evaluations import Evaluation, EvaluationItem, EvaluationSpec, EvaluationState
from tests.live import running_server, wait_until

ROWS = 300
LENGTH = {"type": "function", "source": "def score(output): return float(len(output))", "entry": "score"}


@pytest.mark.slow
def test_a_killed_api_asks_and_grades_only_what_is_missing(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "data") as server,
        Client(server.url, server.key) as client,
        Client(server.url, server.key, patience_s=0) as impatient,
    ):
        rows = [{"messages": [{"role": "user", "content": f"Tell me about {place}."}], "answer": "x"} for place in range(ROWS)]
        client.datasets.create("asked")
        client.datasets.add_version("asked", {"eval": "\n".join(map(json.dumps, rows))})
        client.graders.create("length", LENGTH)

        def create(name: str) -> str:
            params = {"max_tokens": 96, "temperature": 1.0, "samples": 2, "seed": 5}
            given = {"name": name, "data": {"dataset": "asked"}, "models": ["bloomery-tiny"], "graders": ["length"], "params": params}
            return client.evaluations.create(EvaluationSpec.model_validate(given)).id

        reference = client.evaluations.wait(create("undisturbed"), 300)
        disturbed = create("disturbed")

        # A client that is patient asks every two seconds in the end, and misses the rest of the answers.
        def answered() -> int:
            try:
                return impatient.evaluations.get(disturbed).progress.answered
            except Unavailable:
                return 0

        before: dict[int, EvaluationItem] = {}
        for share, victim in ((0.05, "api"), (0.25, "engine-bloomery-tiny"), (0.45, "api")):
            wait_until(lambda share=share: answered() >= share * 2 * ROWS)  # type: ignore[misc]
            assert not client.evaluations.get(disturbed).state.ended
            found = {item.number: item for item in client.evaluations.items(disturbed)}
            assert {number: found[number].answer for number in before} == {number: item.answer for number, item in before.items()}
            before = found
            os.kill(server.pid(victim), signal.SIGKILL)
        ended = client.evaluations.wait(disturbed, 300)
        items = {item.number: item for item in client.evaluations.items(disturbed)}
        assert {number: (items[number].created_us, items[number].answer) for number in before} == {
            number: (item.created_us, item.answer) for number, item in before.items()
        }
        assert said(list(items.values())) == said(list(client.evaluations.items(reference.id)))
        assert figures(ended) == figures(reference)


def said(items: list[EvaluationItem]) -> list[Any]:
    return [(item.number, item.answer.text, item.answer.completion_tokens, item.scores) for item in items]


def figures(evaluation: Evaluation) -> list[Any]:
    assert evaluation.state is EvaluationState.SUCCEEDED, evaluation.reason
    assert evaluation.result is not None
    return [(model.answers, model.failed, model.completion_tokens, model.graders) for model in evaluation.result.models]
