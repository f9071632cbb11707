"""Evals over the unmodified `openai` SDK on a real server, from a file of items to what came of each."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.live import LiveServer, wait_until

BASE = "bloomery-tiny"
CRITERIA: list[Any] = [
    {"type": "string_check", "name": "other", "operation": "ne", "input": "{{ sample.output_text }}", "reference": "{{ item.word }}"},
    {
        "type": "text_similarity",
        "name": "alike",
        "evaluation_metric": "fuzzy_match",
        "input": "{{sample.output_text}}",
        "reference": "{{item.word}}",
        "pass_threshold": 0.99,
    },
    {"type": "python", "name": "spoken", "source": "def grade(sample, item):\n    return float(bool(sample['output_text']))", "pass_threshold": 1},
    {
        "type": "label_model",
        "name": "judged",
        "model": BASE,
        "labels": ["good", "bad"],
        "passing_labels": ["good", "bad"],
        "input": [{"role": "user", "content": "Is it good? {{ sample.output_text }}"}],
        "sampling_params": {"max_completions_tokens": 200, "seed": 1},
    },
    {
        "type": "multi",
        "name": "both",
        "graders": {"a": {"type": "string_check", "name": "a", "operation": "ne", "input": "{{sample.output_text}}", "reference": "{{item.word}}"}},
        "calculate_output": "a / 2",
        "pass_threshold": 0.5,
    },
]


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_a_file_of_items_is_asked_and_graded_by_every_kind_of_criterion(sdk: OpenAI) -> None:
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    config: Any = {"type": "custom", "item_schema": schema, "include_sample_schema": True}
    found = sdk.evals.create(name="words", data_source_config=config, testing_criteria=CRITERIA)
    rows = "\n".join(json.dumps({"item": {"word": f"word-{place}"}}) for place in range(6)).encode()
    file = sdk.files.create(file=("words.jsonl", rows), purpose="evals").id
    source: Any = {
        "type": "responses",
        "model": BASE,
        "source": {"type": "file_id", "id": file},
        "input_messages": {"type": "template", "template": [{"type": "message", "role": "user", "content": "Say {{ item.word }}."}]},
        "sampling_params": {"max_completion_tokens": 12, "temperature": 0.7, "seed": 3},
    }
    run = sdk.evals.runs.create(found.id, data_source=source)
    wait_until(lambda: sdk.evals.runs.retrieve(run.id, eval_id=found.id).status in ("completed", "failed"), 300)
    ended = sdk.evals.runs.retrieve(run.id, eval_id=found.id)
    assert (ended.status, ended.error) == ("completed", None)
    counts = ended.result_counts
    assert (counts.total, counts.passed + counts.failed + counts.errored) == (6, 6)
    by_name = {each.testing_criteria: each for each in ended.per_testing_criteria_results}
    assert (by_name["other"].passed, by_name["spoken"].passed, by_name["both"].passed, by_name["alike"].failed) == (6, 6, 6, 6)
    assert ended.per_model_usage[0].run_model_name == BASE
    items = list(sdk.evals.runs.output_items.list(run.id, eval_id=found.id, limit=4))
    assert [item.datasource_item["word"] for item in items] == [f"word-{place}" for place in range(6)]
    assert {result.name for item in items for result in item.results} >= {"other", "alike", "spoken", "both"}
    assert len({item.sample.output[0].content for item in items}) > 1
    sdk.evals.delete(found.id)
