"""The curves of both loops say what the committed figures say."""

import copy
import re

import pytest

from bench import rl_chart
from bench.line import newest


def test_the_chart_in_the_docs_is_drawn_from_the_newest_committed_figures() -> None:
    assert rl_chart.CHART.read_text() == rl_chart.draw(newest("async-rl")), "draw it again: make charts"


def test_the_interval_of_a_mean_is_that_of_students_t() -> None:
    # By hand: the standard deviation of these is 0.1, t for two degrees of freedom 4.303, and 4.303 * 0.1 / sqrt(3) = 0.24843.
    assert rl_chart.mean([0.4, 0.5, 0.6]) == pytest.approx((0.5, 0.25157, 0.74843), abs=1e-4)
    assert rl_chart.mean([0.9, 1.0, 1.0]).high == 1.0


def test_each_loop_has_a_line_a_seed_a_mean_and_an_interval_at_the_rewards_it_had() -> None:
    result = copy.deepcopy(newest("async-rl"))
    result["asynchronous"]["held_out"] = [[{"reward": 0.5}] * 4, [{"reward": 0.5}] * 4]
    chart, colour = rl_chart.draw(result), rl_chart.COLOURS["asynchronous"]
    lines = re.findall(rf'<polyline points="([^"]+)" fill="none" stroke="{colour}"', chart)
    (interval,) = re.findall(rf'<polygon points="([^"]+)" fill="{colour}"', chart)
    assert len(lines) == 3
    (height,) = {point.partition(",")[2] for line in [*lines, interval] for point in line.split()}
    axis = re.findall(r'<path d="M56 ([\d.]+)H', chart)
    assert float(height) == pytest.approx((float(axis[0]) + float(axis[-1])) / 2, abs=0.1)
