"""`lm-eval` as it was published, over HTTP: `local-completions` scores and generates, `local-chat-completions` answers, on a task that lies here."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from bloomery.models import tiny
from tests.cookbook.setup import ROOT, environment
from tests.live import LiveServer

pytestmark = pytest.mark.slow

CHOICES: Final = ["csv", "json", "zlib"]
ROWS: Final = [
    {"question": "import csv\n# The name of the module above is", "answer": 0},
    {"question": "import json\n# The name of the module above is", "answer": 1},
    {"question": "import zlib\n# The name of the module above is", "answer": 2},
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
    "doc_to_choice": CHOICES,
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITTEN: Final[dict[str, Any]] = {
    "task": "modules_written",
    "output_type": "generate_until",
    "doc_to_target": f"{{{{{CHOICES}[answer]}}}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
_RUN_S: Final = 300


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for task in (SCORED, WRITTEN):
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**TASK, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}))
    return folder


def evaluate(live_server: LiveServer, tasks: Path, model: str, route: str, names: str, *options: str) -> dict[str, Any]:
    """The results that lm-eval writes down."""
    python = environment(ROOT / "build" / "lm-eval", ROOT / "requirements-lm-eval.txt")
    arguments = f"model=bloomery-tiny,base_url={live_server.url}/v1/{route},num_concurrent=4,max_retries=1"
    arguments += f",tokenizer_backend=huggingface,tokenizer={tiny.PATH}" if route == "completions" else ""
    out = tasks / model
    command = [str(python.with_name("lm_eval")), "run", "--model", model, "--model_args", arguments, "--tasks", names, "--include_path", str(tasks)]
    done = subprocess.run(
        [*command, "--output_path", str(out), "--log_samples", *options],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=tasks,
        env={**os.environ, "OPENAI_API_KEY": live_server.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hf")},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    written = next(out.rglob("results_*.json"))
    results: dict[str, Any] = json.loads(written.read_text())["results"]
    return results


@pytest.mark.timeout(1000)
def test_local_completions_scores_and_generates(live_server: LiveServer, tasks: Path) -> None:
    results = evaluate(live_server, tasks, "local-completions", "completions", "modules_scored,modules_written")
    assert 0 <= results["modules_scored"]["acc,none"] <= 1
    assert 0 <= results["modules_written"]["exact_match,none"] <= 1


@pytest.mark.timeout(1000)
def test_local_chat_completions_answers(live_server: LiveServer, tasks: Path) -> None:
    results = evaluate(live_server, tasks, "local-chat-completions", "chat/completions", "modules_written", "--apply_chat_template")
    assert 0 <= results["modules_written"]["exact_match,none"] <= 1
