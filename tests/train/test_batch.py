"""Packing: nothing lost, nothing invented, and a split that depends on lengths and budget alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bloomery.train.batch import check, pack, split, unpack
from bloomery.train.losses import LOSSES
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum
from tests.train.builders import VOCAB, datum, decoder, supervised

CROSS_ENTROPY = LOSSES["cross_entropy"]
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)
CONFIG = decoder().config


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_every_datum_is_in_one_part_and_order_is_kept(lengths, budget):
    parts = split(lengths, budget)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(len(lengths)))
    assert all(part.stop > part.start for part in parts)


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_a_part_fits_the_budget_unless_it_is_one_long_datum(lengths, budget):
    for part in split(lengths, budget):
        rows = sum(-(-length // 4) * 4 for length in lengths[part])
        assert rows <= budget or part.stop - part.start == 1


@given(lengths=LENGTHS, budget=st.integers(4, 200))
def test_no_two_neighbouring_parts_would_fit_together(lengths, budget):
    parts = split(lengths, budget)
    rows = [sum(-(-length // 4) * 4 for length in lengths[part]) for part in parts]
    first = [-(-lengths[part.start] // 4) * 4 for part in parts]
    assert all(held + following > budget for held, following in zip(rows, first[1:], strict=False))


def test_packed_rows_hold_the_data_and_zeros():
    data = supervised([3, 6, 4])
    packed = pack(data, CROSS_ENTROPY)
    assert packed.lengths == [3, 6, 4]
    assert packed.positions_R.tolist() == [*range(4), *range(8), *range(4)]
    assert packed.real_R.tolist() == [True] * 3 + [False] + [True] * 6 + [False] * 2 + [True] * 4
    assert packed.tokens_R[4:10].tolist() == data[1].tokens.numpy().tolist()
    assert packed.inputs["weights"][~packed.real_R].abs().sum() == 0


def test_unpack_gives_each_datum_its_values_back():
    data = (*supervised([3, 6]), datum(np.arange(5), np.arange(10).reshape(5, 2), weights=np.ones((5, 2))))
    packed = pack(data, CROSS_ENTROPY)
    assert packed.targets_RK.shape == (4 + 8 + 8, 2)
    for found, given_datum in zip(unpack(packed.targets_RK, data), data, strict=True):
        assert np.array_equal(found, given_datum.inputs["target_tokens"].numpy())


def test_the_padding_of_narrow_targets_has_no_weight():
    data = (*supervised([4]), datum(np.arange(4), np.ones((4, 3)), weights=np.ones((4, 3))))
    weights = pack(data, CROSS_ENTROPY).inputs["weights"]
    assert torch.count_nonzero(weights[:4, 1:]) == 0
    assert torch.count_nonzero(weights[4:]) == 12


GOOD = supervised([5])[0]


def changed(**inputs: np.ndarray) -> Datum:
    return Datum(tokens=GOOD.tokens, inputs=GOOD.inputs | {name: Array.of(values) for name, values in inputs.items()})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Datum(tokens=Array.of(np.zeros(0, np.int32)), inputs=GOOD.inputs), r"data\[1\]: tokens have shape \[0\]"),
        (Datum(tokens=Array.of(np.full(5, VOCAB, np.int32)), inputs=GOOD.inputs), r"data\[1\]\.tokens: token ids must be integers from 0 to 299"),
        (Datum(tokens=Array.of(np.full(5, -1, np.int32)), inputs=GOOD.inputs), r"data\[1\]\.tokens: token ids"),
        (Datum(tokens=Array.of(np.zeros(5, np.float32)), inputs=GOOD.inputs), r"data\[1\]\.tokens: token ids"),
        (Datum(tokens=Array.of(np.zeros(2000, np.int32)), inputs=GOOD.inputs), r"2000 tokens do not fit the model's context of 1024"),
        (Datum(tokens=GOOD.tokens, inputs={"weights": GOOD.inputs["weights"]}), r"data\[1\] lacks the loss input `target_tokens`"),
        (Datum(tokens=GOOD.tokens, inputs={"target_tokens": GOOD.inputs["target_tokens"]}), r"data\[1\] lacks the loss input `weights`"),
        (changed(target_tokens=np.zeros(4, np.int64)), r"`target_tokens` has shape \[4\], expected \[5\]"),
        (changed(target_tokens=np.zeros((5, 0), np.int64)), r"`target_tokens` has shape \[5, 0\]"),
        (changed(target_tokens=np.full(5, 300, np.int64)), r"data\[1\]\.target_tokens: token ids"),
        (changed(weights=np.zeros((5, 2), np.float32)), r"`weights` has shape \[5, 2\], `target_tokens` has \[5\]"),
    ],
)
def test_a_bad_datum_is_named_with_what_is_wrong(bad, message):
    with pytest.raises(InvalidInput, match=message):
        check([GOOD, bad], CROSS_ENTROPY, CONFIG)


def test_an_empty_batch_is_refused():
    with pytest.raises(InvalidInput, match="empty"):
        check([], CROSS_ENTROPY, CONFIG)


def test_soft_targets_are_for_cross_entropy_only():
    soft = datum(np.arange(5), np.ones((5, 2)), weights=np.ones((5, 2)), logprobs=np.zeros((5, 2)), advantages=np.ones((5, 2)))
    check([soft], CROSS_ENTROPY, CONFIG)
    with pytest.raises(InvalidInput, match=r"shape \[5, 2\], expected \[5\]"):
        check([soft], LOSSES["importance_sampling"], CONFIG)
