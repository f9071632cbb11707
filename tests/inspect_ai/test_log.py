"""What is read in logs that the package wrote (`python -m tests.inspect_ai.setup`): two models that answer, and one that is not there."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bloomery.cli.inspect_log import InspectedModel, InspectedScorer, InspectedTask, inspected
from bloomery.cli.main import app
from bloomery.types.errors import InvalidInput
from bloomery.types.statistics import normal_interval, wilson
from tests.inspect_ai.setup import GONE, LOGS, MODEL, OTHER

MODELS = [OTHER, MODEL, GONE]
EPOCHS = 2


@pytest.fixture(scope="module")
def task() -> InspectedTask:
    (found,) = inspected(LOGS, MODELS)
    return found


def log_of(model: str) -> dict[str, Any]:
    return json.loads((LOGS / f"{model}.json").read_text())


def model_of(task: InspectedTask, name: str) -> InspectedModel:
    return next(model for model in task.models if model.model == name)


def scorer_of(task: InspectedTask, model: str, name: str) -> InspectedScorer:
    return next(scorer for scorer in model_of(task, model).scorers if scorer.scorer == name)


def lengths(model: str) -> dict[str, float]:
    """Of each sample the mean over its epochs, from the samples themselves."""
    by_sample: dict[str, list[float]] = {}
    for sample in log_of(model)["samples"]:
        if "counts" in sample["scores"]:
            by_sample.setdefault(sample["id"], []).append(sample["scores"]["counts"]["value"]["letters"])
    return {sample: sum(values) / EPOCHS for sample, values in by_sample.items()}


def test_models_stand_in_the_order_in_which_they_were_asked(task: InspectedTask) -> None:
    assert (task.task, [model.model for model in task.models]) == ("modules", MODELS)


def test_metrics_are_those_of_the_task_and_means_have_intervals_over_samples(task: InspectedTask) -> None:
    letters, values = scorer_of(task, MODEL, "counts/letters"), list(lengths(MODEL).values())
    assert letters.mean is not None
    assert letters.metrics["mean"] == pytest.approx(letters.mean.value)
    assert letters.mean.value == pytest.approx(sum(values) / len(values))
    assert letters.mean.interval == pytest.approx(normal_interval(values))
    stderr = letters.metrics["stderr"]
    assert stderr is not None
    assert letters.mean.interval[1] - letters.mean.value == pytest.approx(1.959964 * stderr, rel=1e-6)


def test_of_right_and_wrong_alone_the_interval_is_wilsons(task: InspectedTask) -> None:
    one = scorer_of(task, MODEL, "counts/one")
    assert one.mean is not None
    assert (one.mean.value, one.mean.interval) == (1.0, tuple(wilson(5, 5)))


def test_a_sample_that_failed_is_in_no_mean_and_counts_as_invalid(task: InspectedTask) -> None:
    model, letters = model_of(task, MODEL), scorer_of(task, MODEL, "counts/letters")
    assert (model.samples, model.failures) == (6 * EPOCHS, {"RuntimeError('the solver broke')": EPOCHS})
    assert (letters.scored, letters.invalid) == (5 * EPOCHS, EPOCHS)
    assert "broken" not in lengths(MODEL)


def test_an_answer_that_a_scorer_gave_no_score_is_invalid_for_that_scorer_alone(task: InspectedTask) -> None:
    assert [scorer_of(task, MODEL, name).invalid for name in ("includes", "picky")] == [EPOCHS, 2 * EPOCHS]


def test_words_have_no_mean_and_no_pairs(task: InspectedTask) -> None:
    word = scorer_of(task, MODEL, "word")
    assert (word.mean, word.scored, set(word.metrics)) == (None, 5 * EPOCHS, {"long"})
    assert "word" not in {pair.grader for pair in task.differences}


def test_models_are_paired_on_the_same_samples(task: InspectedTask) -> None:
    (pair,) = [pair for pair in task.differences if pair.grader == "counts/letters"]
    mine, theirs = lengths(OTHER), lengths(MODEL)
    differences = [mine[sample] - theirs[sample] for sample in mine]
    assert any(differences)
    assert (pair.model, pair.other, pair.rows) == (OTHER, MODEL, 5)
    assert pair.difference is not None
    assert pair.difference.value == pytest.approx(sum(differences) / 5)
    assert pair.difference.interval == pytest.approx(normal_interval(differences))
    assert (pair.wins, pair.losses) == (sum(each > 0 for each in differences), sum(each < 0 for each in differences))


def test_a_model_that_answers_nothing_has_no_figures(task: InspectedTask) -> None:
    gone = model_of(task, GONE)
    assert {(each.scorer, each.mean, each.scored, each.invalid) for each in gone.scorers} == {
        (name, None, 0, 6 * EPOCHS) for name in ("includes", "counts", "word", "picky")
    }
    assert (gone.status, sum(gone.failures.values()), gone.prompt_tokens, gone.completion_tokens) == ("error", 6 * EPOCHS, 0, 0)
    assert GONE not in {name for pair in task.differences for name in (pair.model, pair.other)}


def test_tokens_are_those_of_all_samples(task: InspectedTask) -> None:
    used = [usage for sample in log_of(MODEL)["samples"] for usage in sample["model_usage"].values()]
    model = model_of(task, MODEL)
    assert model.completion_tokens == sum(usage["output_tokens"] for usage in used) > 0
    assert model.prompt_tokens + model.completion_tokens == sum(usage["total_tokens"] for usage in used)


def test_a_model_that_the_task_insists_on_comes_last() -> None:
    (found,) = inspected(LOGS, [OTHER, GONE])
    assert [model.model for model in found.models] == [OTHER, GONE, MODEL]


def test_failures_that_differ_in_an_address_are_one(tmp_path: Path) -> None:
    log = log_of(MODEL)
    for place, sample in enumerate(sample for sample in log["samples"] if "error" in sample):
        sample["error"]["message"] = f"RetryError(<Future at 0x7f{place} state=finished>)"
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert inspected(tmp_path, MODELS)[0].models[0].failures == {"RetryError(<Future state=finished>)": EPOCHS}


def test_metrics_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    log = log_of(MODEL)
    log["results"]["scores"][0]["metrics"]["stderr"]["value"] = math.nan
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert inspected(tmp_path, MODELS)[0].models[0].scorers[0].metrics["stderr"] is None


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"eval": {"task": "x", "model": "y"}, "stats": {}}'])
def test_what_is_no_log_is_refused_by_name(tmp_path: Path, text: str) -> None:
    shutil.copy(LOGS / f"{MODEL}.json", tmp_path)
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"other\.json is no log of inspect_ai"):
        inspected(tmp_path, MODELS)


def test_an_environment_without_the_package_is_told_what_to_install(tmp_path: Path) -> None:
    asked = ["eval", "inspect", "modules.py", "--model", MODEL, "--url", "http://127.0.0.1:1", "--log-dir", str(tmp_path / "logs")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "no `inspect_ai` in the environment of" in done.output
    assert "-m pip install inspect-ai openai" in done.output
    assert not (tmp_path / "logs").exists()
    no_python = shutil.which("false")
    assert no_python is not None
    assert "is no Python" in CliRunner().invoke(app, [*asked, "--python", no_python]).output
