"""Small tensors are looked at together, in their order, and large ones where they lie."""

import torch

from bloomery.models.pieces import SMALL_ELEMENTS, in_pieces, runs


def test_runs_are_neighbours_that_are_no_more_than_allowed_or_one_alone():
    assert list(runs([3, 3, 3, 9, 1, 1], 6)) == [range(2), range(2, 3), range(3, 4), range(4, 6)]
    assert list(runs([], 6)) == []


def test_elements_keep_their_order_and_their_dtype_and_what_is_large_is_not_copied():
    large = torch.arange(SMALL_ELEMENTS + 1.0)
    tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor(5.0), large, torch.tensor([6.0], dtype=torch.bfloat16), torch.tensor([7.0])]
    found = list(in_pieces(tensors))
    assert [each.tolist() for each in found if len(each) < 9] == [[1.0, 3.0, 2.0, 4.0, 5.0], [6.0], [7.0]]
    assert [each.dtype for each in found] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert found[1].data_ptr() == large.data_ptr()
