"""What logs of `inspect_ai` come to, without the package: what each scorer says of each model, and how models differ on the same samples.

Metrics are those that the task computes. A sample that failed has no score, is in no mean and counts as invalid.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from bloomery.types.errors import InvalidInput
from bloomery.types.evaluations import Difference, Measured
from bloomery.types.resources import Resource
from bloomery.types.statistics import mean_of, score_of

PROVIDER: Final = "openai-api/bloomery/"
"""Before the names of models: inspect's provider for servers of OpenAI's contract, and whose variable has the key."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""In messages that are equal otherwise."""
_Json = dict[str, Any]
_Rows = dict[int | str, float]
"""The score of each sample that has one."""


class InspectedScorer(Resource):
    """What one scorer says of one model's answers."""

    scorer: str
    metrics: dict[str, float | None]
    """By the task's own code, standard errors among them; None of what is no number."""
    mean: Measured | None
    """Over samples, with epochs reduced as the task says; None unless the task itself has it, as `accuracy` or `mean`."""
    scored: int
    invalid: int
    """Answers without a score: the sample failed, or the scorer gave none."""


class InspectedModel(Resource):
    """How one model did in a task. Of `samples` each epoch counts."""

    model: str
    status: str
    reason: str | None
    samples: int
    failures: dict[str, int]
    """How many failed of what, the most frequent first."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    scorers: list[InspectedScorer]
    log: str


class InspectedTask(Resource):
    """A task, the models that it asked, and all pairs of them by each scorer, which `grader` names."""

    task: str
    models: list[InspectedModel]
    differences: list[Difference]


def inspected(folder: Path, models: Sequence[str]) -> list[InspectedTask]:
    """By task, of all logs in a folder, in the order of the models."""
    by_task: dict[str, list[tuple[InspectedModel, dict[str, _Rows]]]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            log = json.loads(file.read_bytes())
            rows = _rows(log)
            by_task.setdefault(log["eval"]["task"], []).append((_model(log, rows, file), rows))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidInput(f"{file} is no log of inspect_ai as it is known here: {error!r}") from error
    for logs in by_task.values():
        # A task may insist on a model of its own.
        logs.sort(key=lambda log: models.index(log[0].model) if log[0].model in models else len(models))
    return [
        InspectedTask(
            task=task,
            models=[model for model, _ in logs],
            differences=[
                Difference.between(scorer, (one.model, mine[scorer]), (other.model, theirs[scorer]))
                for (one, mine), (other, theirs) in combinations(logs, 2)
                for scorer in mine
                if scorer in theirs
            ],
        )
        for task, logs in by_task.items()
    ]


def _model(log: _Json, rows: dict[str, _Rows], file: Path) -> InspectedModel:
    asked, stats, samples = log["eval"], log["stats"], log.get("samples") or []
    total = log["results"]["total_samples"] if log.get("results") else len(samples)
    usage = stats["model_usage"].get(asked["model"], {"total_tokens": 0, "output_tokens": 0})
    took = datetime.fromisoformat(stats["completed_at"]) - datetime.fromisoformat(stats["started_at"])
    return InspectedModel(
        model=asked["model"].removeprefix(PROVIDER),
        status=log["status"],
        reason=(log.get("error") or {}).get("message"),
        samples=total,
        failures=dict(Counter(_ADDRESS.sub("", sample["error"]["message"]) for sample in samples if sample.get("error")).most_common()),
        prompt_tokens=usage["total_tokens"] - usage["output_tokens"],
        completion_tokens=usage["output_tokens"],
        seconds=took.total_seconds(),
        scorers=[_scorer(each, rows.get(_label(each), {}), samples, total) for each in _scorers(log)],
        log=str(file),
    )


def _scorer(scorer: _Json, rows: _Rows, samples: list[_Json], total: int) -> InspectedScorer:
    given = [scores.get(scorer["name"]) or scores.get(scorer["scorer"]) for scores in (sample.get("scores") or {} for sample in samples)]
    scored = sum(score is not None and _value(score, scorer) is not None for score in given)
    return InspectedScorer(
        scorer=_label(scorer),
        metrics={name: _finite(float(metric["value"])) for name, metric in scorer["metrics"].items()},
        mean=Measured.of(score_of(list(rows.values()))) if rows else None,
        scored=scored,
        invalid=total - scored,
    )


def _scorers(log: _Json) -> list[_Json]:
    """Where no sample came to anything there are no results, and the scorers stand in what was asked for."""
    if log.get("results"):
        return list(log["results"]["scores"])
    return [{"name": each["name"], "scorer": each["name"], "metrics": {}} for each in log["eval"].get("scorers") or []]


def _label(scorer: _Json) -> str:
    """A scorer of several values has one of these for each, and each way to reduce epochs has one."""
    name = scorer["name"] if scorer["name"] == scorer["scorer"] else f"{scorer['scorer']}/{scorer['name']}"
    return name if scorer.get("reducer") is None else f"{name} ({scorer['reducer']})"


def _rows(log: _Json) -> dict[str, _Rows]:
    """By scorer, of those whose mean the task itself has: elsewhere values may be words, which inspect reduces to 0."""
    reduced = {(each["scorer"], each.get("reducer")): each["samples"] for each in log.get("reductions") or []}
    by_scorer = {}
    for scorer in _scorers(log):
        samples: list[_Json] = next(
            (reduced[key] for key in ((scorer[of], scorer.get("reducer")) for of in ("name", "scorer")) if key in reduced), []
        )
        values = {each["sample_id"]: _value(each, scorer) for each in samples}
        rows = {sample: float(value) for sample, value in values.items() if isinstance(value, int | float)}
        means = [metric["value"] for name, metric in scorer["metrics"].items() if name in ("accuracy", "mean")]
        if rows and any(math.isclose(mean, mean_of(list(rows.values())).value, abs_tol=1e-9) for mean in means):
            by_scorer[_label(scorer)] = rows
    return by_scorer


def _value(score: _Json, scorer: _Json) -> Any:
    """One of several values, or the only one. Where there is none it is not there, or NaN."""
    value = score["value"].get(scorer["name"]) if isinstance(score["value"], dict) else score["value"]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
