"""The chart of the newest mixed load in `bench/results`: `python -m bench.mixed_chart` writes `docs/mixed-load.svg`."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.line import newest
from bench.svg import canvas, text

CHART: Final = Path(__file__).parents[1] / "docs" / "mixed-load.svg"
COLOURS: Final = {"production": "#1f6fb4", "rollout": "#d9730d", "evaluation": "#2e8b57"}
_PEER: Final = "#8a8f98"
_WIDTH: Final = 940
_LEFT, _RIGHT = 64, 70
_TOP, _PANEL, _SPACE = 74, 128, 40
Values = Sequence[float | None]


class Panel(NamedTuple):
    """One of the diagrams above each other, from the first of its ticks to the last."""

    title: str
    ticks: Sequence[float]
    logarithmic: bool = False


class Frame(NamedTuple):
    """Where a panel lies, in pixels."""

    panel: Panel
    top: float
    seconds: int

    def x(self, second: float) -> float:
        """Of a moment."""
        return _LEFT + second / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Of a value."""
        low, high = self.panel.ticks[0], self.panel.ticks[-1]
        share = math.log(value / low) / math.log(high / low) if self.panel.logarithmic else (value - low) / (high - low)
        return self.top + _PANEL * (1 - share)


def main() -> None:
    """Draw it."""
    CHART.write_text(draw(newest("mixed")))


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG."""
    seconds = len(result["timeline"]["classes"]["steps"])
    panels: list[tuple[Panel, Callable[[dict[str, Any], Frame], Iterator[str]]]] = [
        (Panel("places in the batch, and the floor of each class (dashed)", range(0, result["slots"] + 1, result["slots"] // 4)), _places),
        (Panel("tokens per second", _even(_values(result, "tokens"))), _tokens),
        (Panel("gap between two tokens, ms: 95th percentile, and thin the median", _powers(_values(result, "gap")), True), _gaps),
        (Panel("wait for the first token, ms, median", _powers(_values(result, "wait")), True), _waits),
    ]
    height = _TOP + len(panels) * (_PANEL + _SPACE)
    parts = list(_heading(result))
    for number, (panel, lines) in enumerate(panels):
        frame = Frame(panel, _TOP + number * (_PANEL + _SPACE), seconds)
        parts += [*_bands(result, frame, named=number == 0), *_axes(frame, last=number == len(panels) - 1), *lines(result, frame)]
    return canvas(_WIDTH, height, parts)


def _heading(result: dict[str, Any]) -> Iterator[str]:
    said = f"One replica, {result['slots']} places, {result['threads']} thread, model of {result['size']}, {result['dtype']}, {result['date']}"
    yield text(_LEFT, 20, said, size=13)
    x = _LEFT
    for name, colour in (*COLOURS.items(), ("production when all are of one class", _PEER)):
        yield f'<rect x="{x}" y="32" width="14" height="4" fill="{colour}"/>' + text(x + 19, 38, name)
        x += 50 + 6 * len(name)


def _values(result: dict[str, Any], figure: str) -> list[float]:
    """Everything that may be drawn of figures that begin like this."""
    ways = result["timeline"].values()
    series = [values for way in ways for priority in COLOURS for name, values in way[priority].items() if name.startswith(figure)]
    return [value for values in series for value in values if value]


def _even(values: Sequence[float]) -> Sequence[float]:
    """Ticks from nought to the greatest."""
    step = next(step for step in (100, 250, 500, 1000, 2500, 5000, 10_000, 100_000) if 5 * step >= max(values))
    return range(0, math.ceil(max(values) / step) * step + 1, step)


def _powers(values: Sequence[float]) -> Sequence[float]:
    """Ticks from the least to the greatest, each about three times the one before."""
    ticks = [base * 10**power for power in range(7) for base in (1, 3)]
    below, above = ([tick for tick in ticks if tick <= min(values)] or ticks[:1]), [tick for tick in ticks if tick >= max(values)]
    return [tick for tick in ticks if below[-1] <= tick <= above[0]]


def _bands(result: dict[str, Any], frame: Frame, *, named: bool) -> Iterator[str]:
    for number, phase in enumerate(result["phases"]):
        left, right = (frame.x((number + more) * result["phase_s"]) for more in (0, 1))
        if number % 2 == 0:
            yield f'<rect x="{left:.1f}" y="{frame.top}" width="{right - left:.1f}" height="{_PANEL}" fill="#f3f4f6"/>'
        if named:
            yield text((left + right) / 2, frame.top - 20, phase["name"], anchor="middle", size=10)


def _axes(frame: Frame, *, last: bool) -> Iterator[str]:
    yield text(_LEFT, frame.top - 5, frame.panel.title, colour="#666")
    for tick in frame.panel.ticks:
        y = frame.y(tick)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#d5d8dc" stroke-width="0.6"/>'
        yield text(_LEFT - 6, y + 4, f"{tick:,}", anchor="end")
    if last:
        for second in range(0, frame.seconds + 1, 10):
            yield text(frame.x(second), frame.top + _PANEL + 16, f"{second} s", anchor="middle")


def _places(result: dict[str, Any], frame: Frame) -> Iterator[str]:
    for priority, colour in COLOURS.items():
        floor = result["floors"][priority]
        y = frame.y(floor)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{colour}" stroke-dasharray="5 4" stroke-width="1"/>'
        yield text(_WIDTH - _RIGHT + 5, y + 4, f"floor {floor}", colour=colour)
        yield from _line(_or_none(result["timeline"]["classes"][priority]["places"]), frame, colour)


def _tokens(result: dict[str, Any], frame: Frame) -> Iterator[str]:
    yield from _line(_or_none(result["timeline"]["one_class"]["production"]["tokens"]), frame, _PEER)
    for priority, colour in COLOURS.items():
        yield from _line(_or_none(result["timeline"]["classes"][priority]["tokens"]), frame, colour)


def _gaps(result: dict[str, Any], frame: Frame) -> Iterator[str]:
    # Who goes first is drawn last: who runs gets a token at every step, so the lines of all classes often lie upon each other.
    for priority, colour in reversed(COLOURS.items()):
        seen = result["timeline"]["classes"][priority]
        yield from _line(seen["gap_p50_ms"], frame, colour, width=0.8)
        yield from _line(seen["gap_p95_ms"], frame, colour)


def _waits(result: dict[str, Any], frame: Frame) -> Iterator[str]:
    yield from _dots(result["timeline"]["one_class"]["production"]["wait_p50_ms"], frame, _PEER)
    for priority, colour in COLOURS.items():
        yield from _dots(result["timeline"]["classes"][priority]["wait_p50_ms"], frame, colour)


def _or_none(values: Sequence[float]) -> Values:
    """A class that nobody asks for has no line."""
    return [value or None for value in values]


def _line(values: Values, frame: Frame, colour: str, *, width: float = 1.8) -> Iterator[str]:
    for there, stretch in groupby(enumerate(values), key=lambda each: each[1] is not None):
        if there:
            points = " ".join(f"{frame.x(second + 0.5):.1f},{frame.y(value):.1f}" for second, value in stretch if value is not None)
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def _dots(values: Values, frame: Frame, colour: str) -> Iterator[str]:
    for second, value in enumerate(values):
        if value is not None:
            yield f'<circle cx="{frame.x(second + 0.5):.1f}" cy="{frame.y(value):.1f}" r="2.4" fill="{colour}"/>'


if __name__ == "__main__":
    main()
