"""Merged deltas start from weights that nobody has any more: what spans put back must be exactly those."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.sync.chain.spans import Piece, Reverted, Spans
from tests.sync.chain.models import LAYOUT, same, stepped, version

ALL = range(LAYOUT.chunk_count)


def is_version(weights: Reverted, number: int) -> bool:
    return all(np.array_equal(weights.read(chunk), version(number).read(chunk)) for chunk in LAYOUT.chunks())


def added(spans: Spans, stop: int) -> list[Piece]:
    """The spans that end with this step, which is a version."""
    following = spans.following(version(stop - 1), version(stop), ALL, stop)
    spans.take(following)
    return following.ended


@settings(max_examples=15)
@given(first=st.integers(0, 20), count=st.integers(1, 70))
def test_every_whole_span_and_no_other_is_told_with_the_weights_that_it_started_from(first: int, count: int) -> None:
    spans = Spans(share=100)
    for stop in range(first + 1, first + count + 1):
        found = added(spans, stop)
        assert [piece.stop - piece.start for piece in found] == [span for span in (4, 16, 64) if stop % span == 0 and stop - span >= first]
        for piece in found:
            assert piece.stop == stop
            assert is_version(Reverted(version(stop), piece), piece.start)


def test_a_step_that_is_left_out_breaks_the_spans_that_it_lies_in() -> None:
    spans = Spans(share=100)
    told = {stop: [piece.start for piece in added(spans, stop)] for stop in range(1, 33) if stop != 6}
    assert {stop: starts for stop, starts in told.items() if starts} == {4: [0], 12: [8], 16: [12], 20: [16], 24: [20], 28: [24], 32: [28, 16]}


def test_a_step_that_never_was_a_version_is_not_remembered() -> None:
    spans = Spans(share=100)
    for stop in range(1, 4):
        added(spans, stop)
    kept = spans.size_bytes
    for _ in range(2):
        assert [piece.start for piece in spans.following(version(3), version(4), ALL, 4).ended] == [0]
        assert spans.size_bytes == kept
    assert [piece.start for piece in added(spans, 4)] == [0]


def test_what_is_kept_is_bounded_and_the_longest_level_goes_first() -> None:
    spans = Spans(share=0.4)
    sizes = []
    told: list[int] = []
    for stop in range(1, 33):
        told += [piece.stop - piece.start for piece in added(spans, stop)]
        sizes.append(spans.size_bytes)
    assert max(sizes) <= 0.4 * LAYOUT.size_bytes
    assert told.count(4) == 8
    assert told.count(16) < 2
    spans.clear()
    assert spans.size_bytes == 0


def test_weights_of_before_are_read_only() -> None:
    spans = Spans(share=100)
    for stop in range(1, 5):
        found = added(spans, stop)
    reverted = Reverted(version(4), found[0])
    with pytest.raises(TypeError, match="read only"):
        reverted.write(LAYOUT.chunk(0), np.zeros(0, np.uint32), np.zeros(0, np.uint16))
    assert same(version(4), stepped(version(3), 4))
