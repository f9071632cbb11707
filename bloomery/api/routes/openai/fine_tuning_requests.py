"""How a fine-tuning job is asked for: the forms of all methods, as what `services/jobs/fine_tuning` takes."""

from typing import Any, Final, Literal, NamedTuple

from bloomery.api.routes.openai.closed import Closed, checked
from bloomery.api.routes.openai.requests import parse
from bloomery.api.routes.openai.shapes import Refused
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.fine_tuning import FineTune, FineTuningMethod

Auto = Literal["auto"]
REFUSED: Final[Refused] = {"integrations": ([],)}
REFUSED_IN_REINFORCEMENT: Final[Refused] = {
    "eval_samples": ("auto",),
    "reasoning_effort": ("default",),
}
_INSTEAD: Final = {
    "eval_samples": "held-out prompts are answered four times each; leave it `auto`",
    "reasoning_effort": "models think as their chat template has it; leave it `default`",
}


class SupervisedHyperparameters(Closed, frozen=True, kw_only=True):
    """Of supervised fine-tuning."""

    n_epochs: Auto | int | None = None
    batch_size: Auto | int | None = None
    learning_rate_multiplier: Auto | float | None = None


class DpoHyperparameters(SupervisedHyperparameters, frozen=True, kw_only=True):
    """Of preferences."""

    beta: Auto | float | None = None


class ReinforcementHyperparameters(SupervisedHyperparameters, frozen=True, kw_only=True):
    """Of reinforcement; the last two ask for nothing."""

    compute_multiplier: Auto | float | None = None
    eval_interval: Auto | int | None = None
    eval_samples: Auto | int | None = None
    reasoning_effort: str | None = None


class SupervisedMethod(Closed, frozen=True, kw_only=True):
    """Answers are learnt."""

    hyperparameters: SupervisedHyperparameters | None = None


class DpoMethod(Closed, frozen=True, kw_only=True):
    """Preferences between answers are learnt."""

    hyperparameters: DpoHyperparameters | None = None


class ReinforcementMethod(Closed, frozen=True, kw_only=True):
    """What a grader scores high becomes likelier."""

    grader: dict[str, Any]
    hyperparameters: ReinforcementHyperparameters | None = None


class AskedMethod(Closed, frozen=True, kw_only=True):
    """One of them."""

    type: FineTuningMethod
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: ReinforcementMethod | None = None


class CreateJob(Closed, frozen=True, kw_only=True):
    """Body of a job."""

    model: str
    training_file: str
    validation_file: str | None = None
    method: AskedMethod | None = None
    hyperparameters: SupervisedHyperparameters | None = None
    suffix: str | None = None
    seed: int | None = None
    metadata: dict[str, str] | None = None


class _Chosen(NamedTuple):
    method: FineTuningMethod
    hyperparameters: SupervisedHyperparameters | None
    grader: dict[str, Any] | None
    path: str
    """Where the hyper-parameters stand."""


def parse_job(body: dict[str, Any]) -> FineTune:
    """What is asked for."""
    asked = parse(body, CreateJob, REFUSED)
    chosen = _chosen(asked)
    given = {name: value for name in _names(chosen) if (value := getattr(chosen.hyperparameters, name)) not in (None, "auto")}
    _refuse(given, chosen.path)
    fields: dict[str, Any] = {"hyperparameters": given, "method": chosen.method, "grader": chosen.grader}
    same = ("model", "training_file", "validation_file", "suffix", "seed", "metadata")
    return checked(FineTune, fields | {name: getattr(asked, name) for name in same}, {"hyperparameters": chosen.path})


def _chosen(asked: CreateJob) -> _Chosen:
    if asked.method is None:
        return _Chosen("supervised", asked.hyperparameters, None, "hyperparameters")
    if asked.hyperparameters is not None:
        raise InvalidInput("`hyperparameters` is the older place of those in `method`: give one of them", field="hyperparameters")
    method = asked.method.type
    for other in ("supervised", "dpo", "reinforcement"):
        if other != method and getattr(asked.method, other) is not None:
            raise InvalidInput(f"`method.{other}` is given beside the type `{method}`: leave it out", field=f"method.{other}")
    how: SupervisedMethod | DpoMethod | ReinforcementMethod | None = getattr(asked.method, method)
    grader = how.grader if isinstance(how, ReinforcementMethod) else None
    if method == "reinforcement" and grader is None:
        raise InvalidInput("`method.reinforcement.grader` is missing: it says what an answer is worth", field="method.reinforcement.grader")
    return _Chosen(method, how.hyperparameters if how else None, grader, f"method.{method}.hyperparameters")


def _names(chosen: _Chosen) -> tuple[str, ...]:
    return () if chosen.hyperparameters is None else chosen.hyperparameters.__struct_fields__


def _refuse(given: dict[str, Any], path: str) -> None:
    """Those that ask for nothing are left out."""
    for name, no_ops in REFUSED_IN_REINFORCEMENT.items():
        if given.pop(name, None) not in (None, *no_ops):
            raise NotSupported(f"`{path}.{name}` is not offered: {_INSTEAD[name]}", field=f"{path}.{name}")
