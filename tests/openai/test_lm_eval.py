"""`lm-eval` as it was published, over HTTP: `local-completions` scores and generates, `local-chat-completions` answers, on a task that lies here.

What it logs of every row is what the `openai` SDK hears of the same server, asked in other ways: scores of texts, which `lm-eval` cuts into tokens by
itself; the same tokens forced one by one, which takes no part in scoring prompts; and greedy answers.
"""

import json
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from bloomery.models import tiny
from tests.cookbook.setup import ROOT, environment
from tests.live import LiveServer

pytestmark = pytest.mark.slow

MODEL: Final = "bloomery-tiny"
CHOICES: Final = ["csv", "json", "zlib"]
LIKELIEST: Final = "a module."
"""What the model writes by itself behind each question."""
ROWS: Final[list[dict[str, Any]]] = [
    {"question": "import csv\n# The name of the module above is", "choices": CHOICES, "answer": 0},
    {"question": "import json\n# The name of the module above is", "choices": CHOICES, "answer": 1},
    {"question": "import zlib\n# The name of the module above is", "choices": CHOICES, "answer": 2},
    {"question": "import zlib\n# The name of the module above is", "choices": ["csv", LIKELIEST], "answer": 1},
]
TASK: Final[dict[str, Any]] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "metadata": {"version": 1},
}
SCORED: Final[dict[str, Any]] = {
    "task": "modules_scored",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITTEN: Final[dict[str, Any]] = {
    "task": "modules_written",
    "output_type": "generate_until",
    "doc_to_target": " {{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
GREEDY: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": 8, "temperature": 0.0, "stop": ["\n"]}
"""The same in the SDK's words."""
TOLERANCE: Final = 1e-4
"""Scored in one piece and token by token, which differs in the last bits on machines without bit-exact mode."""
_RUN_S: Final = 300


class Evaluation(NamedTuple):
    """What lm-eval writes down."""

    results: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]
    """Of every task what was asked and answered, row by row."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for task in (SCORED, WRITTEN):
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**TASK, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}))
    return folder


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


def evaluate(live_server: LiveServer, tasks: Path, model: str, route: str, names: Sequence[str], *options: str) -> Evaluation:
    python = environment(ROOT / "build" / "lm-eval", ROOT / "requirements-lm-eval.txt")
    arguments = f"model={MODEL},base_url={live_server.url}/v1/{route},num_concurrent=4,max_retries=1"
    arguments += f",tokenizer_backend=huggingface,tokenizer={tiny.PATH}" if route == "completions" else ""
    out = tasks / model
    command = [str(python.with_name("lm_eval")), "run", "--model", model, "--model_args", arguments]
    done = subprocess.run(
        [*command, "--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *options],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=tasks,
        env={**os.environ, "OPENAI_API_KEY": live_server.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hf")},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return written(out, names)


def written(out: Path, names: Sequence[str]) -> Evaluation:
    (results,) = out.rglob("results_*.json")
    samples = {}
    for name in names:
        (lines,) = out.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, lines.read_text().splitlines()), key=lambda row: row["doc_id"])
        assert [row["doc"] for row in rows] == ROWS
        samples[name] = rows
    return Evaluation(json.loads(results.read_text())["results"], samples)


class Score(NamedTuple):
    """Of a text behind another."""

    loglikelihood: float
    greedy: bool
    """Whether it is what the model writes by itself."""


def echoed(sdk: OpenAI, question: str, choice: str) -> Score:
    """Of a prompt in one piece."""
    told = sdk.completions.create(model=MODEL, prompt=f"{question} {choice}", echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    first = told.text_offset.index(len(question))
    tops = [max(top.values()) for top in told.top_logprobs[first:]]
    return Score(math.fsum(told.token_logprobs[first:]), told.token_logprobs[first:] == tops)


def forced(sdk: OpenAI, question: str, choice: str) -> Score:
    """Of tokens that are sampled one by one, because nothing else may come."""
    tokenizer = Tokenizer.from_file(str(tiny.PATH / "tokenizer.json"))
    before, tokens = (tokenizer.encode(text, add_special_tokens=False).ids for text in (question, f"{question} {choice}"))
    assert tokens[: len(before)] == before
    asked = {"model": MODEL, "max_tokens": 1, "temperature": 0.0, "logprobs": 1, "extra_body": {"logprobs_mode": "raw_logprobs"}}
    told = [
        sdk.completions.create(prompt=tokens[:place], logit_bias={str(tokens[place]): 100}, **asked).choices[0].logprobs
        for place in range(len(before), len(tokens))
    ]
    return Score(
        math.fsum(one.token_logprobs[0] for one in told),
        all(one.token_logprobs[0] == max(one.top_logprobs[0].values()) for one in told),
    )


def assert_scores(found: Evaluation, sdk: OpenAI) -> None:
    logged = [[Score(float(told), greedy == "True") for told, greedy in row["filtered_resps"]] for row in found.samples["modules_scored"]]
    for score in (echoed, forced):
        expected = [[score(sdk, row["question"], choice) for choice in row["choices"]] for row in ROWS]
        for one, other in zip(logged, expected, strict=True):
            assert [each.loglikelihood for each in one] == pytest.approx([each.loglikelihood for each in other], abs=TOLERANCE)
            assert [each.greedy for each in one] == [each.greedy for each in other]
    assert [row[-1].greedy for row in logged] == [row["choices"][-1] == LIKELIEST for row in ROWS], "both are to be seen"
    right = [max(range(len(scores)), key=lambda place: scores[place]) == row["answer"] for row, scores in zip(ROWS, logged, strict=True)]
    assert 0 < sum(right) < len(right), "either is to be seen"
    assert found.results["modules_scored"]["acc,none"] == pytest.approx(sum(right) / len(right))


def assert_answers(found: Evaluation, answers: Sequence[str]) -> None:
    assert [row["filtered_resps"] for row in found.samples["modules_written"]] == [[answer] for answer in answers]
    assert all(answers)
    right = [answer == f" {row['choices'][row['answer']]}" for row, answer in zip(ROWS, answers, strict=True)]
    assert found.results["modules_written"]["exact_match,none"] == pytest.approx(sum(right) / len(right))


def completed(sdk: OpenAI, row: dict[str, Any]) -> str:
    """The likeliest token each time."""
    choice = sdk.completions.create(prompt=row["question"], logprobs=1, **GREEDY).choices[0]
    assert choice.logprobs.token_logprobs == [max(top.values()) for top in choice.logprobs.top_logprobs]
    return choice.text


def answered(sdk: OpenAI, row: dict[str, Any]) -> str:
    """The same in a conversation."""
    messages = [{"role": "user", "content": row["question"]}]
    choice = sdk.chat.completions.create(messages=messages, logprobs=True, top_logprobs=1, **GREEDY).choices[0]
    assert [token.token for token in choice.logprobs.content] == [token.top_logprobs[0].token for token in choice.logprobs.content]
    return choice.message.content


def test_local_completions_scores_and_generates(live_server: LiveServer, sdk: OpenAI, tasks: Path) -> None:
    found = evaluate(live_server, tasks, "local-completions", "completions", ["modules_scored", "modules_written"])
    assert_scores(found, sdk)
    answers = [completed(sdk, row) for row in ROWS]
    assert f" {LIKELIEST}" in answers
    assert_answers(found, answers)


def test_local_chat_completions_answers(live_server: LiveServer, sdk: OpenAI, tasks: Path) -> None:
    found = evaluate(live_server, tasks, "local-chat-completions", "chat/completions", ["modules_written"], "--apply_chat_template")
    answers = [answered(sdk, row) for row in ROWS]
    assert len(set(answers)) > 1, "the question matters"
    assert_answers(found, answers)
