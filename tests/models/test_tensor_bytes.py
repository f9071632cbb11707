"""Tensors out of a blob."""

from itertools import permutations

import torch

from bloomery.models.tensor_bytes import Packed, num_set, pack


def test_tensors_are_joined_in_the_order_that_is_asked_for_whether_they_lie_so_or_not() -> None:
    tensors = {name: torch.randn(shape) for name, shape in (("a", (3, 2)), ("b", (0, 4)), ("c", (5,)), ("d", ()))}
    packed = Packed(pack(tensors, {}))
    for count in (1, 2, 3, 4):
        for names in permutations(tensors, count):
            assert torch.equal(packed.joined(names), torch.cat([tensors[name].reshape(-1) for name in names]))


def test_a_zero_with_a_sign_is_set() -> None:
    assert num_set(torch.tensor([0.0, -0.0, 1.0, float("nan")])) == 3
