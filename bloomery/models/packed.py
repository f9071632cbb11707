"""A decoder's twin for sampling, whose matrices lie in the order that oneDNN multiplies them in (`products.packed`).

Norms, the embedding and whatever else is no matrix of a product are shared with the decoder that it was made from; matrices take their memory a
second time. Training and everything else that reads weights keeps to that decoder.
"""

import copy
from typing import Final

from torch import Tensor, nn

from bloomery.models.decoder import Decoder
from bloomery.models.products import packed

PROJECTIONS: Final = frozenset({"qkv", "q", "kv", "o", "gate_up", "down"})
"""Parameters of a block that nothing but `product` reads where they are matrices; those of experts are stacks of matrices and stay as they are."""


def pack(decoder: Decoder) -> Decoder:
    """The twin; asks for `can_pack`."""
    # What is named here is not copied but taken as it is.
    taken: dict[int, object] = {id(parameter): parameter for parameter in decoder.parameters()}
    taken |= {id(matrix): _packed(matrix) for matrix in _matrices(decoder)}
    twin = copy.deepcopy(decoder, taken)
    twin.head = _packed(decoder.head_weight)
    return twin


def packed_bytes(decoder: Decoder) -> int:
    """Memory that the twin takes beside the decoder."""
    return sum(matrix.nbytes for matrix in (*_matrices(decoder), decoder.head_weight))


def _matrices(decoder: Decoder) -> list[nn.Parameter]:
    return [parameter for name, parameter in decoder.named_parameters() if name.rpartition(".")[2] in PROJECTIONS and parameter.dim() == 2]


def _packed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(packed(weight), requires_grad=False)
