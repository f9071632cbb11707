"""The chart of the mixed load says what the committed figures say."""

import copy
import re

from bench import mixed_chart
from bench.line import newest


def test_the_chart_in_the_docs_is_drawn_from_the_newest_committed_figures() -> None:
    assert mixed_chart.CHART.read_text() == mixed_chart.draw(newest("mixed")), "draw it again: make charts"


def test_a_class_that_stays_at_its_floor_is_drawn_along_its_dashed_line() -> None:
    result = copy.deepcopy(newest("mixed"))
    result["timeline"]["classes"]["evaluation"]["places"] = [float(result["floors"]["evaluation"])] * len(result["timeline"]["classes"]["steps"])
    colour = mixed_chart.COLOURS["evaluation"]
    chart = mixed_chart.draw(result)
    (dashed,) = re.findall(rf'<path d="M\d+ ([\d.]+)H\d+" stroke="{colour}" stroke-dasharray', chart)
    (places, *_) = re.findall(rf'<polyline points="([^"]+)" fill="none" stroke="{colour}"', chart)
    assert {point.partition(",")[2] for point in places.split()} == {dashed}


def test_a_second_in_which_nothing_of_a_class_came_interrupts_its_line() -> None:
    result = copy.deepcopy(newest("mixed"))
    gaps: list[float | None] = [10.0] * len(result["timeline"]["classes"]["steps"])
    result["timeline"]["classes"]["production"]["gap_p95_ms"] = gaps
    whole = mixed_chart.draw(result).count("<polyline")
    gaps[5] = None
    assert mixed_chart.draw(result).count("<polyline") == whole + 1
