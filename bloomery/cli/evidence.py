"""What is kept with weights that go live, of evaluations and jobs by their names: the evidence that the dashboard gives and says in words."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from bloomery.cli.show import harmless
from bloomery.client import Client
from bloomery.types.errors import Conflict, NotFound
from bloomery.types.evaluations import Evaluation
from bloomery.types.jobs import Job

Found = TypeVar("Found", Evaluation, Job)
_TINKER: Final = "tinker://"
_CITED: Final = ("evaluations", "jobs")


def with_evidence(client: Client, named: Sequence[str], version: str) -> tuple[str, dict[str, Any]]:
    """The weights behind `version`, what evaluations measured of them, and jobs that ended with them; one that measured none of them is refused.

    Weights and no path: what is behind one may be another version by the time that it goes live.
    """
    if not named:
        return version, {}
    found = [_found(client, name) for name in dict.fromkeys(named)]
    weights = _weights_of(client, version)
    # A name and the id of the same are one.
    evaluations = {each.id: each for each in found if isinstance(each, Evaluation)}.values()
    jobs = {each.id: each for each in found if isinstance(each, Job)}.values()
    parts = {"evaluations": [cited for each in evaluations for cited in answered(each, weights)], "jobs": [compared(each, weights) for each in jobs]}
    return weights, {name: part for name, part in parts.items() if part}


def evidence_words(evidence: dict[str, Any]) -> str:
    """What it names, in few words; `--json` has all of it."""
    named: list[str] = []
    for part, value in evidence.items():
        names = [each["name"] for each in value if isinstance(each, dict) and isinstance(each.get("name"), str)] if isinstance(value, list) else []
        named += names if part in _CITED and names else [part]
    return ", ".join(map(harmless, named)) or "-"


def answered(evaluation: Evaluation, weights: str) -> list[dict[str, Any]]:
    """The scores of these weights, under each name by which they were asked."""
    spec = evaluation.spec
    if evaluation.result is None:
        then = "name one that has succeeded" if evaluation.state.ended else f"wait for it with `bloomery eval show {spec.name} --watch`"
        raise Conflict(f"evaluation `{spec.name}` {evaluation.state.words}, and has no result: {then}", field="evidence")
    asked = [model for model in evaluation.result.models if model.version == weights]
    if not asked:
        others = ", ".join(f"`{model.model}` ({(model.version or 'elsewhere')[:12]})" for model in evaluation.result.models)
        raise Conflict(
            f"evaluation `{spec.name}` did not ask the weights {weights[:12]} that are to be live, but {others}: name one that did, or make it with "
            f"`bloomery eval create NAME --dataset {spec.data.dataset} --model {weights} --grader {spec.graders[0].label}`",
            field="evidence",
        )
    return [
        {"evaluation": evaluation.id, "name": spec.name, "model": model.model}
        | {"scores": [score.model_dump(mode="json", include={"grader", "rows", "mean"}) for score in model.graders if score.mean is not None]}
        for model in asked
    ]


def compared(job: Job, weights: str) -> dict[str, Any]:
    """What it measured before and after, where these weights are what it ended with."""
    name = job.spec.name
    if job.result is None:
        raise Conflict(f"job `{name}` {job.state.words}, and has compared nothing: name one that has succeeded", field="evidence")
    if job.result.version != weights:
        raise Conflict(
            f"job `{name}` compared the weights {job.result.version[:12]} that it ended with, and not {weights[:12]}, which are to be live: name an "
            "evaluation of those, or leave it out",
            field="evidence",
        )
    if not job.result.compared:
        data = job.spec.data.dataset
        raise Conflict(
            f"job `{name}` compared nothing, for it had no rows that were held out: name an evaluation, or hold rows out before it trains again "
            f"(`bloomery dataset split {data} --eval 0.1`)",
            field="evidence",
        )
    measured = job.result.model_dump(mode="json", include={"base_version", "compared"})
    return {"job": job.id, "name": name, **measured}


def _found(client: Client, name: str) -> Evaluation | Job:
    evaluation, job = _there(client.evaluations.get, name), _there(client.jobs.get, name)
    if evaluation is not None and job is not None:
        raise Conflict(f"`{name}` is an evaluation and a job: give the id, `{evaluation.id}` or `{job.id}`", field="evidence")
    if (found := evaluation or job) is None:
        raise NotFound(
            f"there is no evaluation and no job `{name}`: `bloomery eval list` and `bloomery job list` show those that there are", field="evidence"
        )
    return found


def _there(get: Callable[[str], Found], name: str) -> Found | None:
    try:
        return get(name)
    except NotFound:
        return None


def _weights_of(client: Client, version: str) -> str:
    """Their hash: of a base model's files behind its alias, of what was saved behind a path."""
    if version.startswith(_TINKER):
        return client.versions.card(version).version
    return next((model.base_hash for model in client.models() if model.alias == version), version)
