"""Packing: nothing lost, nothing invented."""

import numpy as np
import pytest
import torch

from bloomery.train.batch import check_token_ids, pack, unpack
from bloomery.train.losses import find_loss
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum
from tests.train.builders import VOCAB, datum, supervised

CROSS_ENTROPY = find_loss("cross_entropy", {})


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


@pytest.mark.parametrize("outside", [VOCAB, -1, 1 << 40])
@pytest.mark.parametrize("where", ["tokens", "target_tokens"])
def test_ids_outside_the_vocabulary_reach_no_look_up(outside, where):
    good = supervised([5])[0]
    ids = np.array([0, 1, outside, 3, 4])
    bad = Datum(tokens=Array.of(ids), inputs=good.inputs) if where == "tokens" else Datum(good.tokens, good.inputs | {where: Array.of(ids)})
    check_token_ids([good], VOCAB)
    with pytest.raises(InvalidInput, match=r"data\[1\] holds token ids outside the vocabulary: they are from 0 to 299"):
        check_token_ids([good, bad], VOCAB)


def test_what_a_datum_leaves_out_is_filled_in_for_its_own_rows():
    own = {"logprobs": np.full(5, -1.0), "advantages": np.array([0, 1, 2, 0, 3.0])}
    plain = datum(np.arange(5), np.arange(5), **own)
    told = datum(np.arange(3), np.arange(3), logprobs=np.zeros(3), advantages=np.ones(3), clip_low_threshold=[0.1, 0.2, 0.3])
    inputs = pack([plain, told], find_loss("gspo", {"clip_low_threshold": 0.5})).inputs
    assert inputs["clip_low_threshold"][:, 0].tolist() == pytest.approx([0.5] * 5 + [0] * 3 + [0.1, 0.2, 0.3, 0])
    assert inputs["clip_high_threshold"][:, 0].tolist() == pytest.approx([1.0004] * 5 + [0] * 3 + [1.0004] * 3 + [0])
    assert inputs["sequence_ratio_mask"][:, 0].tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0]


def test_the_datum_with_a_wrong_id_is_named_among_very_many():
    good, targets = (np.ones(length, np.int64) for length in (1, 1))
    data = [datum(good, targets)] * 3 + [datum(good, np.full(1, VOCAB))] + [datum(good, targets)] * 3
    with pytest.raises(InvalidInput, match=r"data\[3\] holds token ids"):
        check_token_ids(data, VOCAB)
