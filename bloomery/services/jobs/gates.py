"""Whether a job may begin where another ended: that one succeeded, and what was measured of it is what the gate asks for."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from bloomery.types.errors import InvalidInput
from bloomery.types.jobs import Compared, Gate, Job, JobSpec
from bloomery.types.methods import Measure


class _Never(NamedTuple):
    """Bounds of a measure that nothing reaches."""

    beyond: Callable[[float], bool]
    asked: str
    why: str


_SHARE: Final = _Never(lambda bound: bound > 1, "of at least", "it is a share, of 1 at most")
_DISTANCE: Final = _Never(lambda bound: bound < 0, "of at most", "it is 0 or more")
_NEVER: Final[Mapping[Measure, _Never]] = {"exact": _SHARE, "prefers": _SHARE, "loss": _DISTANCE, "kl/teacher": _DISTANCE}


def check_gate(gate: Gate, before: JobSpec, held_out: int) -> None:
    """Refuse one that cannot hold, whatever comes of the job `before`, which has so many rows held out."""
    measures = before.method.measures
    if gate.measure not in measures:
        known = " and ".join(f"`{measure}`" for measure in measures)
        problem = f"the gate asks for `{gate.measure}`, and job `{before.name}` ({before.method.kind}) measures {known}"
        raise InvalidInput(problem, field="begin.gate")
    if not held_out or (gate.measure == "exact" and not before.evaluation.answers):
        lacks = "no rows are answered: set its `evaluation.answers`" if held_out else f"no rows in `{before.evaluation.split}`: hold some out"
        raise InvalidInput(f"the gate asks for `{gate.measure}` of job `{before.name}`, which has {lacks}", field="begin.gate")
    measured = min(held_out, before.evaluation.rows, before.evaluation.answers if gate.measure == "exact" else held_out)
    if gate.bound is None and measured == 1:
        problem = f"the gate asks for a better `{gate.measure}` of job `{before.name}`, by more than an interval"
        raise InvalidInput(f"{problem}, and a single row has none: hold more out, or give a `bound`", field="begin.gate")
    if gate.bound is not None and (never := _NEVER.get(gate.measure)) is not None and never.beyond(gate.bound):
        raise InvalidInput(f"the gate asks for `{gate.measure}` {never.asked} {gate.bound:g}, which it never is: {never.why}", field="begin.gate")


def obstacle(before: Job, gate: Gate | None) -> str | None:
    """What keeps a job from beginning where this one ended; None: nothing does."""
    name = before.spec.name
    if before.result is None:
        return f"job `{name}`, where it begins, {before.state.words}" + (f": {before.reason}" if before.reason else "")
    if gate is None:
        return None
    measured = next((each for each in before.result.compared if each.name == gate.measure), None)
    if measured is None:
        return f"its gate asks for `{gate.measure}`, which was not measured of job `{name}`"
    return None if _holds(gate, measured) else f"its gate does not hold: {_words(gate, measured, name)}"


def _holds(gate: Gate, measured: Compared) -> bool:
    sign = 1 if measured.higher_is_better else -1
    if gate.bound is not None:
        return sign * (measured.after - gate.bound) >= 0
    interval = measured.difference_interval
    return interval is not None and min(sign * bound for bound in interval) > 0


def _words(gate: Gate, measured: Compared, name: str) -> str:
    if gate.bound is not None:
        most = "at least" if measured.higher_is_better else "at most"
        return f"`{gate.measure}` of job `{name}` is {measured.after:.4g}, and {most} {gate.bound:g} is asked for"
    interval = measured.difference_interval
    shown = "of a single row" if interval is None else f"[{interval[0]:+.4g}, {interval[1]:+.4g}]"
    return f"`{gate.measure}` of job `{name}` is not better than what it began with: the difference is {measured.difference:+.4g} {shown}"
