"""What `bench.delta_sizes` counts of two sets of weights, and of steps together."""

import numpy as np
import pytest

from bench.delta_sizes import CODECS, compared, shown
from bench.weights import Shape, models
from bloomery.sync.codec.layout import Layout, MemoryWeights
from bloomery.types.tensor_file import TensorSpec

LAYOUT = Layout.of({"a": TensorSpec("BF16", (100, 100)), "b": TensorSpec("BF16", (3000,))})


def weights(seed: int) -> MemoryWeights:
    chance = np.random.default_rng(seed)
    return MemoryWeights(
        LAYOUT,
        {tensor.name: (chance.standard_normal(tensor.numel, np.float32).view(np.uint32) >> 16).astype(np.uint16) for tensor in LAYOUT.tensors},
    )


def test_a_step_is_counted_and_what_is_taken_is_the_shortest() -> None:
    old = weights(0)
    new = MemoryWeights(LAYOUT, {tensor.name: old[tensor.name].copy() for tensor in LAYOUT.tensors})
    new["a"][::100] += 1
    step = compared(old, new)
    assert (step.elements, step.raw_bytes, step.changed) == (13_000, 26_000, 100)
    assert step.sizes["auto"] == min(step.sizes[codec] for codec in CODECS)
    told = shown([step, step])
    assert told["changed_by_step"] == [0.769, 0.769]
    assert told["codecs"]["auto"]["ratio"] == round(step.raw_bytes / step.sizes["auto"], 2)
    assert told["least_bits"] <= told["codecs"]["tight"]["bits"]
    assert told["xor_zstd_1"]["auto_smaller"] == round(step.xor_bytes / step.sizes["auto"], 2)


def test_where_everything_changes_elements_travel_whole() -> None:
    told = shown([compared(weights(0), weights(1))])
    assert told["changed"] > 99
    assert set(told["codecs"]["auto"]["chunks"]) <= {"planes", "raw"}
    assert "changed_by_step" not in told


def test_a_run_that_learnt_nothing_has_no_figures() -> None:
    with pytest.raises(SystemExit, match="no step taught anything"):
        shown([])


def test_an_update_of_a_generated_matrix_takes_what_exponents_leave_and_a_third_of_the_usual_delta() -> None:
    step = compared(*models([Shape("matrix", 2048, 1024, 0.026)], 1e-6, 1, 0))
    assert 0.006 < step.changed / step.elements < 0.009
    assert 8 * step.sizes["tight"] < 1.05 * step.least_bits
    assert 3 * step.sizes["tight"] < step.xor_bytes
