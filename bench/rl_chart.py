"""The curves of the newest comparison of both loops in `bench/results`: `python -m bench.rl_chart` writes `docs/rl-curves.svg`.

Of problems that neither loop saw: a thin line a seed, and their mean with its 95 % interval over the seeds (Student's t).
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.line import newest
from bench.svg import canvas, text

CHART: Final = Path(__file__).parents[1] / "docs" / "rl-curves.svg"
COLOURS: Final = {"asynchronous": "#d9730d", "synchronous": "#1f6fb4"}
_T_95: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Quantile 0.975 of Student's t for as many seeds."""
_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 60, 36


class Mean(NamedTuple):
    """Over the seeds, with the ends of its interval."""

    value: float
    low: float
    high: float


def main() -> None:
    """Draw it."""
    CHART.write_text(draw(newest("async-rl")))


def mean(values: Sequence[float]) -> Mean:
    """Of at least two seeds; of more than are known an interval that is a little too wide."""
    value = statistics.fmean(values)
    half = _T_95[min(len(values), max(_T_95))] * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(value, max(0.0, value - half), min(1.0, value + half))


def curves(result: dict[str, Any], loop: str) -> list[list[float]]:
    """The reward held out of each seed after each part of the time."""
    return [[each["reward"] for each in seed] for seed in result[loop]["held_out"]]


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG."""
    return canvas(_WIDTH, _HEIGHT, [*_heading(result), *_axes(result), *(part for loop in COLOURS for part in _curves(result, loop))])


def _heading(result: dict[str, Any]) -> Iterator[str]:
    seeds = len(result["setting"]["seeds"])
    yield text(_LEFT, 20, f"Reward of problems held out, {seeds} seeds, {result['cores']} cores, {result['date']}", size=13)
    x = _LEFT
    for loop, colour in COLOURS.items():
        yield f'<rect x="{x}" y="32" width="14" height="4" fill="{colour}"/>' + text(x + 19, 38, f"{loop}: mean, its 95 % interval, thin the seeds")
        x += 300


def _x(result: dict[str, Any], seconds: float) -> float:
    whole_s: float = result["setting"]["seconds"]
    return _LEFT + seconds / whole_s * (_WIDTH - _LEFT - _RIGHT)


def _y(reward: float) -> float:
    return _TOP + (1 - reward) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(result: dict[str, Any]) -> Iterator[str]:
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        yield f'<path d="M{_LEFT} {_y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="#d5d8dc" stroke-width="0.6"/>'
        yield text(_LEFT - 6, _y(tick) + 4, f"{tick:.1f}", anchor="end")
    for seconds in _moments(result, "synchronous"):
        yield text(_x(result, seconds), _HEIGHT - _BOTTOM + 18, f"{seconds:g} s", anchor="middle")


def _moments(result: dict[str, Any], loop: str) -> list[float]:
    """Seconds after which a loop was measured."""
    count = len(curves(result, loop)[0])
    return [result["setting"]["seconds"] * (number + 1) / count for number in range(count)]


def _curves(result: dict[str, Any], loop: str) -> Iterator[str]:
    colour, seconds = COLOURS[loop], _moments(result, loop)
    means = [mean(values) for values in zip(*curves(result, loop), strict=True)]
    ends = [*zip(seconds, (each.high for each in means), strict=True), *reversed(list(zip(seconds, (each.low for each in means), strict=True)))]
    yield f'<polygon points="{_points(result, ends)}" fill="{colour}" fill-opacity="0.12"/>'
    for rewards in curves(result, loop):
        yield _line(_points(result, list(zip(seconds, rewards, strict=True))), colour, 0.7)
    yield _line(_points(result, [(at, each.value) for at, each in zip(seconds, means, strict=True)]), colour, 2.2)


def _points(result: dict[str, Any], values: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_x(result, seconds):.1f},{_y(reward):.1f}" for seconds, reward in values)


def _line(points: str, colour: str, width: float) -> str:
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


if __name__ == "__main__":
    main()
