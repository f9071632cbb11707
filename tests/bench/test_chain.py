"""What `bench.chain` counts, and that what a chain moves of generated weights is as little as it should be. Bytes depend on no machine."""

from argparse import Namespace

import numpy as np
import pytest

from bench.chain import engine_less, generated, measured
from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.types.tensor_file import TensorSpec

LAYOUT = Layout.of({"a": TensorSpec("BF16", (100, 100))})


def test_bases_and_deltas_are_counted_apart_and_beside_whole_snapshots() -> None:
    first, some = np.random.default_rng(0).integers(1 << 16, size=10_000, dtype=np.uint16), np.arange(10_000) % 100 == 0
    told = measured([MemoryWeights(LAYOUT, {"a": first + np.uint16(number) * some}) for number in range(11)])
    assert (told["versions"], told["changed"], told["bases"]) == (11, pytest.approx(0.01), 1)
    # Eleven are put; the follower fetches twelve, the late ones seven and three.
    assert told["whole_bytes"] == LAYOUT.size_bytes * (11 + 12 + 7 + 3)
    assert told["less"] < told["less_from_first_model"]
    assert told["less"] < told["less_deltas_only"] < 1
    assert told["less_deltas_only"] - told["less"] == pytest.approx(told["base_share"] * told["moved_bytes"] / told["whole_bytes"])


def test_what_the_engine_says_of_a_run_adds_up() -> None:
    assert engine_less([{"sync/bytes": 100, "sync/whole_bytes": 100}, {"sync/bytes": 20, "sync/whole_bytes": 100}]) == pytest.approx(0.4)


@pytest.mark.slow
def test_fifty_steps_with_a_base_a_restart_and_two_late_joiners_move_three_percent_of_whole_snapshots() -> None:
    told = measured(generated(Namespace(steps=50, layers=4, hidden=256, tokens=300, learning_rate=1e-6, seed=0)))
    assert told["versions"] == 51
    assert told["less"] >= 0.97
    assert told["less_deltas_only"] >= 0.99
