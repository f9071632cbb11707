"""A decoder's twin for sampling, whose matrices lie in the order that they are multiplied in (`products.packed`).

Norms, the embedding and whatever else is no matrix of a product are shared with the decoder that it was made from; matrices take their memory a
second time, and training and everything else that reads weights keeps to that decoder. Where nobody reads them, `pack_in_place` lets go of the plain
ones: what is left gives the same products, and can be neither filled, nor trained, nor published.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from bloomery.models import products
from bloomery.models.decoder import Decoder
from bloomery.models.memory import LargePages
from bloomery.models.products import PACKABLE, packed
from bloomery.models.rests import rest


def pack(decoder: Decoder) -> Decoder:
    """The twin; asks for `can_pack`. One that was packed in place is its own."""
    if is_packed(decoder):
        return decoder
    # What is named here is not copied but taken as it is; both turn by the same table.
    copied: dict[int, object] = {id(each): each for each in (*decoder.parameters(), decoder.rope, decoder.full_rope)}
    for layer in decoder.layers:
        # The copy of the whole finds it there.
        copy.deepcopy(layer, copied)
        rest()
    twin = copy.deepcopy(decoder, copied)
    pack_in_place(twin)
    return twin


def pack_in_place(decoder: Decoder) -> None:
    """Pack one matrix after the other, so that there is never more than one twice."""
    pages = LargePages()
    decoder.head = packed(decoder.head_weight, pages)
    rest()
    for module, name, weight in _weights(decoder):
        delattr(module, name)
        own = packed(weight, pages) if weight.dim() == 2 else nn.ParameterList(packed(matrix, pages) for matrix in weight.unbind())
        setattr(module, name, own)
        rest()


def is_packed(decoder: Decoder) -> bool:
    """Whether its matrices are packed."""
    return products.is_packed(decoder.head_weight)


def packed_bytes(decoder: Decoder) -> int:
    """Memory of the packed matrices of a plain decoder."""
    return sum(weight.nbytes for _, _, weight in _weights(decoder)) + decoder.head_weight.nbytes


class _Weight(NamedTuple):
    module: nn.Module
    name: str
    weight: nn.Parameter


def _weights(decoder: Decoder) -> Iterator[_Weight]:
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in PACKABLE:
                yield _Weight(module, name, parameter)
