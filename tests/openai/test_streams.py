"""A thousand streams at once, on an api process of its own with an engine's end that says a token of each in every step."""

import asyncio

import pytest

from bench.streams import many


@pytest.mark.slow
def test_a_thousand_streams_are_served_together_without_an_error() -> None:
    figures = asyncio.run(many(streams=1000, tokens=8, step_s=0.1))
    assert figures["errors"] == 0
    assert figures["cpu_ms_per_request"] < 100
