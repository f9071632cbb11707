"""What graders and agents give: a number, or a `Reward` that says whose it is; whatever else they give is a `Fault` with a kind."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Final, Literal, NamedTuple

from bloomery.grade.template import unicode

FailureKind = Literal["sampling", "raised", "timeout", "no_reward", "wrong_type", "not_finite", "foreign_reward", "foreign_version", "no_tokens"]
"""What went wrong: no sample came; the grader raised, took too long, gave nothing, no number, one that is not finite or beyond `MAX_REWARD`, or the
reward of another rollout; tokens are of weights that the loop did not publish; or an agent asked the model for nothing."""
MAX_REWARD: Final = 1e12
"""Of any number in a reward, plus or minus. Gradients grow as advantages do, which may be the rewards themselves, and a norm sums their squares in
float32, which ends at 3.4e38: a square of 1e24 leaves room for the sum. Statistics of such numbers are also far from where doubles end."""

MAX_PARTS: Final = 128
"""Of a reward: twice what a grader may measure beside its score."""
MAX_PART_CHARS: Final = 128
"""Of the name of one."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that says whose it is; `parts` are shown and not trained on."""

    rollout_id: str
    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: Mapping[str, float] = field(default_factory=dict)
    """What single answers of an agent earned beside that, by the id of the answer."""
    reason: str = ""
    """Why, in words: shown beside the rollout where those are recorded."""


class Fault(NamedTuple):
    """Why a reward is none; `field` is that of a report (`reward`, `turns.NAME`, `parts.NAME`)."""

    kind: FailureKind
    message: str
    field: str


def fault_of(told: Reward) -> Fault | None:
    """What there is in a reward that can neither be trained on nor shown."""
    named: dict[str, Any] = {"turns": told.turns, "parts": told.parts}
    numbers: dict[str, Any] = {"reward": told.value}
    if not isinstance(told.reason, str):
        return Fault("wrong_type", f"`reason` is a {type(told.reason).__name__}, not a text", "reason")
    for field_name, given in named.items():
        if not isinstance(given, Mapping):
            return Fault("wrong_type", f"`{field_name}` is a {type(given).__name__}, not a mapping of names to numbers", field_name)
        if others := [name for name in given if not isinstance(name, str)]:
            return Fault("wrong_type", f"a name in `{field_name}` is a {type(others[0]).__name__}, not a string", field_name)
        if field_name == "parts" and (problem := _problem_of_names(given)) is not None:
            return Fault("wrong_type", problem, field_name)
        numbers |= {f"{field_name}.{name}": number for name, number in given.items()}
    return next((fault for place, number in numbers.items() if (fault := _fault_of_number(place, number)) is not None), None)


def _problem_of_names(parts: Mapping[str, Any]) -> str | None:
    """Parts are shown by their names, and kept with a loop's cursor: what cannot be written, or has no end, would end the loop there."""
    if len(parts) > MAX_PARTS:
        return f"`parts` has {len(parts)} numbers, and a reward has {MAX_PARTS} at most"
    for name in parts:
        if len(name) > MAX_PART_CHARS:
            return f"a name in `parts` has {len(name)} characters, and at most {MAX_PART_CHARS} are shown"
        if unicode(name) != name:
            return "a name in `parts` holds half a surrogate pair, which is not text"
    return None


def _fault_of_number(place: str, given: Any) -> Fault | None:
    if given is None and not place.startswith("parts."):
        return Fault("no_reward", f"`{place}` is missing: the grader or the agent gave nothing", place)
    if not isinstance(given, Real):
        return Fault("wrong_type", f"`{place}` is a {type(given).__name__}, not a number", place)
    try:
        number = float(given)
    except OverflowError:
        # A whole number may have more digits than can be written.
        number = math.inf
    if math.isfinite(number) and abs(number) <= MAX_REWARD:
        return None
    shown = "a number that no float can hold" if isinstance(given, Integral) and math.isinf(number) else f"{number:g}"
    return Fault("not_finite", f"`{place}` is {shown}: it must be finite, from {-MAX_REWARD:g} to {MAX_REWARD:g}", place)
