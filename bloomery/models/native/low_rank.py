"""Low-rank updates of products, as adapters add them, and their gradients.

Shapes: R rows, I inputs of a product, O its outputs, r rank.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bloomery.models.native import bindings, buffers, gemm
from bloomery.models.pads import pad_to


class TargetPlace(NamedTuple):
    """Where the factors of one target lie in those of several that are joined. Elsewhere `b` is zero, and gets no gradient."""

    first_rank: int
    ranks: int
    first_output: int
    outputs: int


TargetPlaces = Sequence[TargetPlace]
"""Of all that are joined, in the order of their ranks."""


def adds(*tensors: Tensor) -> bool:
    """Whether `add_updates` takes these and is worth it: all of float32, or, where a processor has no tiles for it, of bfloat16, in main memory."""
    return gemm.multiplies(*tensors) or (_takes_halves() and all(each.dtype is torch.bfloat16 and each.is_cpu for each in tensors))


def add_updates(out_RO: Tensor, x_RI: Tensor, factors: Sequence[tuple[Tensor, Tensor]], places: Sequence[TargetPlaces] | None = None) -> Tensor:
    """`out += (x @ a.T) @ b.T` in place, for as many neighbouring rows with each of the factors, `a` [r, I] and `b` [O, r]; returns `x @ a.T` [R, r].

    `places` says of each of them what is joined in it; without, all of it is one target's. Fastest where the transposed factors lie in one piece.
    In bfloat16 sums run in float32, and `x @ a.T` is rounded before it is multiplied again.
    """
    assert out_RO.stride(1) == 1
    x_RI, own = buffers.rows(x_RI), [(_columns(a_rI), _columns(b_Or)) for a_rI, b_Or in factors]
    rows, (rank, inputs), outputs = len(x_RI) // len(factors), factors[0][0].shape, out_RO.shape[1]
    half = x_RI.dtype is torch.bfloat16
    low_Rr, numbered = (buffers.halves if half else buffers.floats)(len(x_RI), rank), _numbered(places, len(own), rank, outputs)
    first_low, step = low_Rr.data_ptr(), rows * rank * low_Rr.element_size()
    updates = [
        (number * rows, rows, rank, a.data_ptr(), b.data_ptr(), first_low + number * step, first, len(targets))
        for number, ((a, b), (first, targets)) in enumerate(zip(own, numbered, strict=True))
    ]
    threads = torch.get_num_threads()
    arguments = (
        *(out_RO.data_ptr(), out_RO.stride(0), x_RI.data_ptr(), x_RI.stride(0), _with_places(updates, numbered), len(own)),
        *(outputs, inputs, threads, len(x_RI) * rank * (inputs + outputs)),
    )
    if half:
        near = buffers.floats(threads, bindings.ROWS * rank)
        bindings.call("add_half_updates", *arguments, near.data_ptr(), near.shape[1])
    else:
        bindings.call("add_updates", *arguments)
    return low_Rr


def _takes_halves() -> bool:
    return gemm.FUSES and bindings.present() and not bindings.tiles_are_granted()


def update_gradients(
    grad_RO: Tensor,
    x_RI: Tensor,
    low_Rr: Tensor,
    factors: Sequence[tuple[Tensor, Tensor]],
    grad_RI: Tensor | None,
    places: Sequence[TargetPlaces] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """What reaches each of the factors of `add_updates`, in their layouts; what reaches `x` is added to `grad_RI`, where it is wanted.

    `low_Rr` as `add_updates` returned it. Each pair's numbers depend on its own rows alone.
    """
    assert low_Rr.is_contiguous()
    assert grad_RI is None or grad_RI.stride(1) == 1
    x_RI, grad_RO = buffers.rows(x_RI), buffers.rows(grad_RO)
    own = [(a_rI.t().contiguous(), b_Or.t().contiguous()) for a_rI, b_Or in factors]
    count, (inputs, rank), outputs, threads = len(own), own[0][0].shape, grad_RO.shape[1], torch.get_num_threads()
    numbered = _numbered(places, count, rank, outputs)
    written = [sum(place.ranks * place.outputs for place in targets) for _, targets in numbered]
    grads = [(buffers.floats(inputs, rank), buffers.floats(rank, outputs, zeros=numbers < rank * outputs)) for numbers in written]
    pairs = [
        (*(tensor.data_ptr() for tensor in (*pair, *grad)), first, len(targets))
        for pair, grad, (first, targets) in zip(own, grads, numbered, strict=True)
    ]
    room = (
        max(sum(pad_to(place.ranks, bindings.PANEL) * place.outputs for place in targets) for _, targets in numbered)
        + pad_to(inputs, bindings.PANEL) * rank
    )
    grad_low, scratch = buffers.floats(len(low_Rr), rank + bindings.PANEL), buffers.floats(count, room)
    bindings.call(
        "update_gradients",
        *((None, 0) if grad_RI is None else (grad_RI.data_ptr(), grad_RI.stride(0))),
        *(grad_RO.data_ptr(), grad_RO.stride(0), x_RI.data_ptr(), x_RI.stride(0), low_Rr.data_ptr(), _with_places(pairs, numbered), count),
        *(len(x_RI) // count, rank, outputs, inputs, grad_low.data_ptr(), scratch.data_ptr(), room, threads),
    )
    return [(grad_a_Ir.t(), grad_b_rO.t()) for grad_a_Ir, grad_b_rO in grads]


def _columns(factor: Tensor) -> Tensor:
    """With its columns one behind the other from its address on."""
    return factor if factor.stride() == (1, len(factor)) else factor.t().contiguous()


def _numbered(places: Sequence[TargetPlaces] | None, count: int, rank: int, outputs: int) -> list[tuple[int, TargetPlaces]]:
    """How many places there are in the factors before, and those in each."""
    own = [[TargetPlace(0, rank, 0, outputs)]] * count if places is None else places
    assert all(one.first_rank + one.ranks <= other.first_rank for targets in own for one, other in pairwise(targets))
    return list(zip(accumulate(map(len, own), initial=0), own, strict=False))


def _with_places(records: Iterable[Iterable[int]], places: Sequence[tuple[int, TargetPlaces]]) -> Any:
    """What a kernel reads: the records, and behind them all places."""
    return buffers.integers(chain(chain.from_iterable(records), (number for _, own in places for place in own for number in place)))
