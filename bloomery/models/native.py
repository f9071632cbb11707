"""Kernels in C for float32 on a CPU: products, attention, the pointwise parts of a block, the head's reduction and the draw of tokens.

A step of few rows of a small model is little more than the calls that it makes, and torch makes ten of what is one here; a pass of many rows
reads and writes every activation as often. Where they cannot be compiled (`models/compiled`), and for other dtypes and devices, torch computes the
same formulas (`available`); which of the two is part of the numerics id.
Shapes: R rows, N heads, E head dimension, I intermediate, or inputs of a product, O its outputs, P panels of W outputs, r rank, V vocabulary; B rows
to draw from, k draws of each; H query heads, K key/value heads; B blocks in all, P places of each, S slots, or steps of the sums of a result with C
columns, M blocks of each slot.
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bloomery.models.compiled import FLOAT as _F
from bloomery.models.compiled import INTEGER as _I
from bloomery.models.compiled import POINTER as _P
from bloomery.models.compiled import Compiled
from bloomery.models.pads import BLOCK_PLACES, pad_to
from bloomery.models.program import current_recorder
from bloomery.obs.machine import processor_flags

_BLOCK: Final = 512
"""Values that are added up before their sum is."""
_LANES: Final = 8
"""Values that are computed together."""
_TOGETHER: Final = 16
"""Queries whose scores are in the cache at a time, where a group of heads has no more."""
_QUERIES: Final = 48
"""Queries whose gradients are computed with the same keys."""
_PANEL: Final = 32
"""Outputs of a product that lie side by side."""
_TILE_STEP: Final = 32
"""Inputs of a product of bfloat16 that are multiplied together."""
_LIBRARY: Final = Compiled(
    "native",
    Path(__file__).with_name("kernels"),
    {
        "rms_norm": (_P, _P, _P, _I, _I, _P, _I, _I, _I, _F),
        "rms_norm_backward": (_P, _P, _P, _I, _I, _P, _P, _I, _I, _I),
        "rms_norm_weight_gradient": (_P, _P, _P, _I, _I, _P, _I, _I, _I),
        "add": (_P, _P, _P, _I, _I, _I),
        "rotate": (_P, _P, _I, _I, _P, _P, _F, _I, _I, _I),
        "swiglu": (_P, _P, _I, _I),
        "swiglu_backward": (_P, _P, _P, _I, _I),
        "logsumexp": (_P, _P, _I, _I),
        "softmax_gradient": (_P, _P, _P, _I, _I),
        "invert": (_P, _P, _P, _P, _I, _I, _I),
        "draw": (_P, _P, _P, _P, _P, _P, _I, _I),
        "attend": (_P, _P, _P, _I, _I, _P, _P, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _P, _I),
        "attend_backward": (_P, _P, _P, _P, _P, _I, _I, _P, _I, _I, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _I, _P, _I, _I),
        "keep": (_P, _P, _P, _I, _I, _P, _I, _P, _I, _I, _I),
        "product": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I, _I),
        "product_unpacked": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _P, _I),
        "pack": (_P, _P, _I, _I, _I, _I),
        "add_updates": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I),
        "update_gradients": (_P, _I, _P, _I, _P, _I, _P, _P, _I, _I, _I, _I, _I, _P, _P, _I, _I),
        "split_product": (_P, _I, _P, _I, _I, _P, _I, _I, _I, _I, _I, _I, _P, _I),
        "split_product_granted": (_P,),
        "split_product_room": (_P, _I),
        "half_product": (_P, _I, _P, _I, _P, _I, _I, _I, _I),
        "half_product_unpacked": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _P, _I),
        "half_product_room": (_P, _I, _I, _I),
        "half_pack": (_P, _P, _I, _I, _I, _I),
        "run": (_P, _I),
    },
    # Contracted products and sums would have other bits on processors that have them.
    flags=(
        *("-ffp-contract=off", "-fno-math-errno", "-fopenmp"),
        *(f"-D{name}={value}" for name, value in {"BLOCK": _BLOCK, "TOGETHER": _TOGETHER, "QUERIES": _QUERIES, "PANEL": _PANEL}.items()),
        f"-DPLACES={BLOCK_PLACES}",
    ),
    instead="torch",
)

_FUSES: Final = "fma" in processor_flags()


def present() -> bool:
    """Whether there are kernels here."""
    return _LIBRARY.functions is not None


def identity() -> str:
    """Whose kernels compute, for the numerics id."""
    return f"{_LIBRARY.identity}{'-split' * _tiles_are_granted()}" if present() else "torch"


def available(*tensors: Tensor) -> bool:
    """Whether the functions below take them."""
    return _LIBRARY.functions is not None and all(tensor.dtype is torch.float32 and tensor.is_cpu for tensor in tensors)


def multiplies(*tensors: Tensor) -> bool:
    """Whether `product`, `pack` and `add_updates` take these, and are worth it: without fused multiply-adds other libraries are faster."""
    return _FUSES and available(*tensors)


def multiplies_halves(*tensors: Tensor) -> bool:
    """Whether `half_product` and `half_pack` take these rows and matrices: bfloat16 on a processor with tiles of it."""
    return all(tensor.dtype is torch.bfloat16 and tensor.is_cpu and tensor.shape[-1] % _TILE_STEP == 0 for tensor in tensors) and _tiles_are_granted()


def splits(*tensors: Tensor) -> bool:
    """Whether `split_product` takes these."""
    return available(*tensors) and _tiles_are_granted()


def split_room_bytes() -> int:
    """Memory that a `split_product` takes meanwhile."""
    return _number("split_product_room", torch.get_num_threads()) if _tiles_are_granted() else 0


def split_product(a_RS: Tensor, b_SC: Tensor, out_RC: Tensor | None = None) -> Tensor:
    """`a @ b` [R, C], added to `out` where there is one, with float32's precision from products of bfloat16.

    A number depends on its row and its column alone. No sampler computes it, so its bits may be other than those of `product`.
    """
    a_RS, b_SC = (x if 1 in x.stride() else x.contiguous() for x in (a_RS, b_SC))
    (rows, steps), columns, threads = a_RS.shape, b_SC.shape[1], torch.get_num_threads()
    assert len(b_SC) == steps
    adds = out_RC is not None
    out_RC = _floats(rows, columns, zeros=steps == 0) if out_RC is None else out_RC
    assert out_RC.shape == (rows, columns)
    assert out_RC.stride(1) == 1
    scratch = torch.empty(split_room_bytes(), dtype=torch.uint8, device="cpu")
    _call(
        "split_product",
        *(out_RC.data_ptr(), out_RC.stride(0), a_RS.data_ptr(), *a_RS.stride(), b_SC.data_ptr(), b_SC.stride(1), b_SC.stride(0)),
        *(rows, columns, steps, adds, scratch.data_ptr(), threads),
    )
    return out_RC


@cache
def _tiles_are_granted() -> bool:
    """Whether the processor has tiles of bfloat16 and the system lets this process use them, which it is asked once."""
    return present() and bool(_number("split_product_granted"))


def _number(function: str, *arguments: int) -> int:
    """What a function of the library says."""
    found = _I(0)
    getattr(_LIBRARY.functions, function)(ctypes.addressof(found), *arguments)
    return found.value


def pack(weight_OI: Tensor) -> Tensor:
    """A matrix in the order in which it is multiplied with [P, I, W], zeros behind the last output."""
    weight_OI = _rows(weight_OI)
    outputs, inputs = weight_OI.shape
    panels_PIW = _floats(pad_to(outputs, _PANEL) // _PANEL, inputs, _PANEL)
    _call("pack", panels_PIW.data_ptr(), weight_OI.data_ptr(), weight_OI.stride(0), outputs, inputs, torch.get_num_threads())
    return panels_PIW


def unpack(panels_PIW: Tensor, outputs: int) -> Tensor:
    """The matrix [O, I] of these panels."""
    return panels_PIW.transpose(1, 2).flatten(0, 1)[:outputs]


def product(x_RI: Tensor, panels_PIW: Tensor, outputs: int) -> Tensor:
    """Rows times a packed matrix [R, O]. A row's bits depend on nothing but the row and the matrix."""
    x_RI = _rows(x_RI)
    rows, inputs = x_RI.shape
    assert panels_PIW.shape[1] == inputs
    out_RO = _floats(rows, outputs)
    _call(
        "product",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), panels_PIW.data_ptr(), _PANEL * inputs, _PANEL),
        *(rows, outputs, inputs, torch.get_num_threads()),
    )
    return out_RO


def product_unpacked(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same bits with a plain matrix, which is packed a panel at a time."""
    x_RI, weight_OI = _rows(x_RI), _rows(weight_OI)
    (rows, inputs), outputs, threads = x_RI.shape, len(weight_OI), torch.get_num_threads()
    assert weight_OI.shape[1] == inputs
    out_RO, scratch = _floats(rows, outputs), _floats(threads, _PANEL * inputs)
    _call(
        "product_unpacked",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), weight_OI.data_ptr(), weight_OI.stride(0)),
        *(rows, outputs, inputs, scratch.data_ptr(), threads),
    )
    return out_RO


def half_pack(weight_OI: Tensor) -> Tensor:
    """A matrix of bfloat16 in the order in which tiles of it are multiplied [P, I / 32, 2, 16, 32], zeros behind the last output."""
    weight_OI = _rows(weight_OI)
    outputs, inputs = weight_OI.shape
    panels = _halves(pad_to(outputs, _PANEL) // _PANEL, inputs // _TILE_STEP, 2, _TILE_STEP // 2, _TILE_STEP)
    _call("half_pack", panels.data_ptr(), weight_OI.data_ptr(), weight_OI.stride(0), outputs, inputs, torch.get_num_threads())
    return panels


def half_unpack(panels: Tensor, outputs: int) -> Tensor:
    """The matrix [O, I] of these panels."""
    # Of a panel, a step and a side: pairs of inputs, and for each of them both numbers of every output.
    return panels.reshape(*panels.shape[:4], -1, 2).permute(0, 2, 4, 1, 3, 5).flatten(3, 5).flatten(0, 2)[:outputs]


def half_product(x_RI: Tensor, panels: Tensor, outputs: int) -> Tensor:
    """Rows of bfloat16 times a packed matrix [R, O], summed in float32. A row's bits depend on nothing but the row and the matrix."""
    x_RI = _rows(x_RI)
    rows, inputs = x_RI.shape
    assert panels.shape[1] * _TILE_STEP == inputs
    out_RO = _halves(rows, outputs)
    addresses = out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), panels.data_ptr()
    _call("half_product", *addresses, rows, outputs, inputs, torch.get_num_threads())
    return out_RO


def half_product_unpacked(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same bits with a plain matrix, which is packed some panels at a time."""
    x_RI, weight_OI = _rows(x_RI), _rows(weight_OI)
    (rows, inputs), outputs, threads = x_RI.shape, len(weight_OI), torch.get_num_threads()
    assert weight_OI.shape[1] == inputs
    out_RO, scratch = _halves(rows, outputs), torch.empty(_number("half_product_room", outputs, inputs, threads), dtype=torch.uint8, device="cpu")
    _call(
        "half_product_unpacked",
        *(out_RO.data_ptr(), outputs, x_RI.data_ptr(), x_RI.stride(0), weight_OI.data_ptr(), weight_OI.stride(0)),
        *(rows, outputs, inputs, scratch.data_ptr(), threads),
    )
    return out_RO


class TargetPlace(NamedTuple):
    """Where the factors of one target lie in those of several that are joined. Elsewhere `b` is zero, and gets no gradient."""

    first_rank: int
    ranks: int
    first_output: int
    outputs: int


TargetPlaces = Sequence[TargetPlace]
"""Of all that are joined, in the order of their ranks."""


def add_updates(out_RO: Tensor, x_RI: Tensor, factors: Sequence[tuple[Tensor, Tensor]], places: Sequence[TargetPlaces] | None = None) -> Tensor:
    """`out += (x @ a.T) @ b.T` in place, for as many neighbouring rows with each of the factors, `a` [r, I] and `b` [O, r]; returns `x @ a.T` [R, r].

    `places` says of each of them what is joined in it; without, all of it is one target's. Fastest where the transposed factors lie in one piece.
    """
    assert out_RO.stride(1) == 1
    x_RI, own = _rows(x_RI), [(a_rI.t().contiguous(), b_Or.t().contiguous()) for a_rI, b_Or in factors]
    rows, (inputs, rank), outputs = len(x_RI) // len(factors), own[0][0].shape, out_RO.shape[1]
    low_Rr, numbered = _floats(len(x_RI), rank), _numbered(places, len(own), rank, outputs)
    first_low, step = low_Rr.data_ptr(), rows * rank * low_Rr.element_size()
    updates = [
        (number * rows, rows, rank, a.data_ptr(), b.data_ptr(), first_low + number * step, first, len(targets))
        for number, ((a, b), (first, targets)) in enumerate(zip(own, numbered, strict=True))
    ]
    _call(
        "add_updates",
        *(out_RO.data_ptr(), out_RO.stride(0), x_RI.data_ptr(), x_RI.stride(0), _with_places(updates, numbered), len(own)),
        *(outputs, inputs, torch.get_num_threads(), len(x_RI) * rank * (inputs + outputs)),
    )
    return low_Rr


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
    x_RI, grad_RO = _rows(x_RI), _rows(grad_RO)
    own = [(a_rI.t().contiguous(), b_Or.t().contiguous()) for a_rI, b_Or in factors]
    count, (inputs, rank), outputs, threads = len(own), own[0][0].shape, grad_RO.shape[1], torch.get_num_threads()
    numbered = _numbered(places, count, rank, outputs)
    written = [sum(place.ranks * place.outputs for place in targets) for _, targets in numbered]
    grads = [(_floats(inputs, rank), _floats(rank, outputs, zeros=numbers < rank * outputs)) for numbers in written]
    pairs = [
        (*(tensor.data_ptr() for tensor in (*pair, *grad)), first, len(targets))
        for pair, grad, (first, targets) in zip(own, grads, numbered, strict=True)
    ]
    room = max(sum(pad_to(place.ranks, _PANEL) * place.outputs for place in targets) for _, targets in numbered) + pad_to(inputs, _PANEL) * rank
    grad_low, scratch = _floats(len(low_Rr), rank + _PANEL), _floats(count, room)
    _call(
        "update_gradients",
        *((None, 0) if grad_RI is None else (grad_RI.data_ptr(), grad_RI.stride(0))),
        *(grad_RO.data_ptr(), grad_RO.stride(0), x_RI.data_ptr(), x_RI.stride(0), low_Rr.data_ptr(), _with_places(pairs, numbered), count),
        *(len(x_RI) // count, rank, outputs, inputs, grad_low.data_ptr(), scratch.data_ptr(), room, threads),
    )
    return [(grad_a_Ir.t(), grad_b_rO.t()) for grad_a_Ir, grad_b_rO in grads]


def _numbered(places: Sequence[TargetPlaces] | None, count: int, rank: int, outputs: int) -> list[tuple[int, TargetPlaces]]:
    """How many places there are in the factors before, and those in each."""
    own = [[TargetPlace(0, rank, 0, outputs)]] * count if places is None else places
    assert all(one.first_rank + one.ranks <= other.first_rank for targets in own for one, other in pairwise(targets))
    return list(zip(accumulate(map(len, own), initial=0), own, strict=False))


def _with_places(records: Iterable[Iterable[int]], places: Sequence[tuple[int, TargetPlaces]]) -> Any:
    """What a kernel reads: the records, and behind them all places."""
    return _integers(chain(chain.from_iterable(records), (number for _, own in places for place in own for number in place)))


class Spans(NamedTuple):
    """Rows that attend: tokens that stand in neighbouring rows, one behind the other in the sequence of a slot."""

    places_N4: Tensor
    """First row, slot, position of the first token, tokens."""
    longest: int
    """Places that the longest of the sequences may take."""
    tokens: int
    tables_SM: Tensor | None = None
    """The blocks of each slot's sequence, in order, `BLOCK_PLACES` places each; without it a slot is where a sequence in one piece begins."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, int]]) -> Self:
        """From first rows, slots, positions and numbers of tokens."""
        return cls(torch.tensor(spans), max(start + count for _, _, start, count in spans), sum(count for _, _, _, count in spans))


def attends(q_RHE: Tensor, *keys_and_values: Tensor) -> bool:
    """Whether `attend` takes these."""
    return q_RHE.shape[-1] % _LANES == 0 and available(q_RHE, *keys_and_values)


def attends_heads(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """The same of tensors that there are not yet."""
    return attends(torch.empty(0, 0, head_dim, dtype=dtype, device=device))


def attend(
    q_RHE: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None, *, logged: bool = False
) -> tuple[Tensor, Tensor | None]:
    """What each query gathers of its sequence up to itself [R, H, E], zeros in rows outside of the spans; where `logged`, also the logarithm of the
    sum of exponentials [R, H].

    `keys` and `values` are blocks [B, K, P, E], which the tables of the spans name, or the packed rows themselves [R, K, E], where a span's slot is
    its first row.
    """
    rows, heads, dim = q_RHE.shape
    out_RHE = _floats(rows, heads, dim, zeros=spans.tokens < rows)
    logs_RH = _floats(rows, heads, zeros=True) if logged else None
    q_RHE, keys, values = (_rows(tensor) for tensor in (q_RHE, keys, values))
    threads = torch.get_num_threads()
    # Torch's, because it says so where memory runs out.
    scratch = _floats(threads, max(_TOGETHER, heads // keys.shape[1]), pad_to(spans.longest, _LANES) + dim)
    _call(
        "attend",
        *(out_RHE.data_ptr(), None if logs_RH is None else logs_RH.data_ptr(), q_RHE.data_ptr(), *q_RHE.stride()[:2]),
        *(keys.data_ptr(), _strides(keys), values.data_ptr(), _strides(values), *_of_spans(spans)),
        *(heads, keys.shape[1], dim, window or 0, scratch.data_ptr(), threads),
    )
    return out_RHE, logs_RH


def attend_backward(grad_RHE: Tensor, saved: Sequence[Tensor], spans: Spans, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What reaches queries, keys and values of packed rows, from `saved`: these, and what `attend` gave for them with its logarithms.

    Spans are whole sequences. A sequence's numbers depend on nothing but the sequence.
    """
    (q_RHE, k_RKE, v_RKE), out_RHE, logs_RH = map(_rows, saved[:3]), saved[3].contiguous(), saved[4].contiguous()
    grad_RHE, threads = grad_RHE.contiguous(), torch.get_num_threads()
    (rows, heads, dim), kv_heads = q_RHE.shape, k_RKE.shape[1]
    grads = [_floats(rows, number, dim, zeros=spans.tokens < rows) for number in (heads, kv_heads, kv_heads)]
    room = 4 * _PANEL * dim + 4 * _PANEL * _QUERIES + pad_to(spans.longest, _LANES) * (heads // kv_heads)
    scratch = _floats(threads, room)
    _call(
        "attend_backward",
        *(grad.data_ptr() for grad in grads),
        grad_RHE.data_ptr(),
        *(number for tensor in (q_RHE, k_RKE, v_RKE) for number in (tensor.data_ptr(), *tensor.stride()[:2])),
        *(out_RHE.data_ptr(), logs_RH.data_ptr(), spans.places_N4.data_ptr(), len(spans.places_N4)),
        *(heads, kv_heads, dim, window or 0, scratch.data_ptr(), room, threads),
    )
    return grads[0], grads[1], grads[2]


def keep(storage_BKPE: Tensor, x_RKE: Tensor, spans: Spans) -> None:
    """Put the rows of keys, or values, in the places of their tokens."""
    assert storage_BKPE.stride(-1) == 1
    x_RKE = _rows(x_RKE)
    pointers = storage_BKPE.data_ptr(), _strides(storage_BKPE), x_RKE.data_ptr(), *x_RKE.stride()[:2]
    _call("keep", *pointers, *_of_spans(spans), *x_RKE.shape[1:])


def _of_spans(spans: Spans) -> tuple[int, int, int | None, int]:
    """Where they are and how many, and the same of the blocks of a slot."""
    tables_SM = spans.tables_SM
    tables = (None, 0) if tables_SM is None else (tables_SM.data_ptr(), tables_SM.stride(0))
    return spans.places_N4.data_ptr(), len(spans.places_N4), *tables


def add(x_RX: Tensor, y: Tensor) -> Tensor:
    """The sum of rows, or of all of them and one [X]."""
    x_RX, y = x_RX.contiguous(), y.contiguous()
    out_RX = _floats(*x_RX.shape)
    rows, width = x_RX.shape
    _call("add", out_RX.data_ptr(), x_RX.data_ptr(), y.data_ptr(), width if y.dim() == 2 else 0, rows, width)
    return out_RX


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, scaled: bool = False) -> tuple[Tensor, Tensor | None]:
    """`x * scale * weight` of vectors in the last dimension, and where `scaled` their scales [..., 1], which the backward takes."""
    x, weight = _vectors(x), weight.contiguous()
    out = _floats(*x.shape)
    scale = _floats(*x.shape[:-1], 1) if scaled else None
    rows, heads, *strides = _layout(x)
    pointer = None if scale is None else scale.data_ptr()
    _call("rms_norm", out.data_ptr(), pointer, x.data_ptr(), *strides, weight.data_ptr(), rows, heads, x.shape[-1], eps)
    return out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What reaches `x`."""
    x, grad, weight = _vectors(x), grad.contiguous(), weight.contiguous()
    grad_x = _floats(*x.shape)
    rows, heads, *strides = _layout(x)
    pointers = grad_x.data_ptr(), grad.data_ptr(), x.data_ptr(), *strides, weight.data_ptr(), scale.data_ptr()
    _call("rms_norm_backward", *pointers, rows, heads, x.shape[-1])
    return grad_x


def rms_norm_weight_gradient(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """What reaches the weight."""
    x, grad = _vectors(x), grad.contiguous()
    grad_weight = _floats(x.shape[-1])
    rows, heads, *strides = _layout(x)
    _call("rms_norm_weight_gradient", grad_weight.data_ptr(), grad.data_ptr(), x.data_ptr(), *strides, scale.data_ptr(), rows, heads, x.shape[-1])
    return grad_weight


def rotate(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor, *, back: bool = False) -> Tensor:
    """The halves of every head, turned; a cosine and a sine for each row and pair."""
    assert x_RNE.dim() == 3
    assert cos_R1H.numel() == sin_R1H.numel() == len(x_RNE) * x_RNE.shape[-1] // 2
    x_RNE, cos_R1H, sin_R1H = _vectors(x_RNE), cos_R1H.contiguous(), sin_R1H.contiguous()
    out_RNE = _floats(*x_RNE.shape)
    rows, heads, *strides = _layout(x_RNE)
    pointers = out_RNE.data_ptr(), x_RNE.data_ptr(), *strides, cos_R1H.data_ptr(), sin_R1H.data_ptr()
    _call("rotate", *pointers, -1.0 if back else 1.0, rows, heads, x_RNE.shape[-1])
    return out_RNE


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the halves of the last dimension."""
    gate_up = gate_up.contiguous()
    out = _floats(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _call("swiglu", out.data_ptr(), gate_up.data_ptr(), _count(out), out.shape[-1])
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """What reaches `gate_up`."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    grad_gate_up = _floats(*gate_up.shape)
    _call("swiglu_backward", grad_gate_up.data_ptr(), grad.data_ptr(), gate_up.data_ptr(), _count(grad), grad.shape[-1])
    return grad_gate_up


def logsumexp(x_RV: Tensor) -> Tensor:
    """Of every row [R]."""
    x_RV = x_RV.contiguous()
    out_R = _floats(len(x_RV))
    _call("logsumexp", out_R.data_ptr(), x_RV.data_ptr(), *x_RV.shape)
    return out_R


def softmax_gradient(x_RV: Tensor, mass_R: Tensor) -> Tensor:
    """`-softmax(x) * mass`."""
    x_RV, mass_R = x_RV.contiguous(), mass_R.contiguous()
    out_RV = _floats(*x_RV.shape)
    _call("softmax_gradient", out_RV.data_ptr(), x_RV.data_ptr(), mass_R.data_ptr(), *x_RV.shape)
    return out_RV


def invert(logs_BV: npt.NDArray[np.float32], numbers_Bk: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The columns [B, k] in whose shares of `exp(logs)` numbers from 0 to 1 fall."""
    logs_BV, numbers_Bk = np.ascontiguousarray(logs_BV, np.float32), np.ascontiguousarray(numbers_Bk, np.float64)
    found_Bk = np.empty(numbers_Bk.shape, np.int64)
    sums = np.empty((len(logs_BV), -(-logs_BV.shape[1] // _BLOCK)))
    _call("invert", found_Bk.ctypes.data, logs_BV.ctypes.data, numbers_Bk.ctypes.data, sums.ctypes.data, *logs_BV.shape, numbers_Bk.shape[1])
    return found_Bk


def draw(
    logits_BV: npt.NDArray[np.float32], seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.uint64], samples_B: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """A token from every row [B], by `invert` of `logits - max` with the number of its seed, position and sample."""
    logits_BV = np.ascontiguousarray(logits_BV, np.float32)
    found_B = np.empty(len(logits_BV), np.int64)
    sums = np.empty((len(logits_BV), -(-logits_BV.shape[1] // _BLOCK)))
    arrays = found_B, logits_BV, seeds_B, positions_B, samples_B, sums
    _call("draw", *(array.ctypes.data for array in arrays), *logits_BV.shape)
    return found_B


def _call(kernel: str, *arguments: Any) -> None:
    """A kernel, which goes into the program that is recorded, or has no place in one."""
    if (recorder := current_recorder()) is not None:
        if (address := _LIBRARY.address(f"call_{kernel}")) is None:
            recorder.refuse(kernel)
        else:
            recorder.add(address, arguments)
    getattr(_LIBRARY.functions, kernel)(*arguments)


def run(words: int, calls: int) -> None:
    """A program (`program.Program`)."""
    _LIBRARY.functions.run(words, calls)


def _floats(*shape: int, zeros: bool = False) -> Tensor:
    """Room for an answer, whatever the process that we are part of takes for its default dtype and device."""
    if not zeros and (recorder := current_recorder()) is not None:
        return recorder.floats(shape)
    return (torch.zeros if zeros else torch.empty)(shape, dtype=torch.float32, device="cpu")


def _halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cpu")


def _rows(x: Tensor) -> Tensor:
    """With vectors in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(storage: Tensor) -> Any:
    """Floats from block to block, from head to head and from place to place; packed rows are the places of one block."""
    strides = storage.stride()
    return _integers((strides[0], strides[1], strides[2] if storage.dim() == 4 else strides[0]))


def _integers(numbers: Iterable[int]) -> Any:
    """What a kernel reads at an address; programs keep it."""
    own = tuple(numbers)
    return (_I * len(own))(*own)


def _vectors(x: Tensor) -> Tensor:
    """In a layout that `_layout` can tell."""
    return x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.contiguous()


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, floats from row to row and from head to head."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return _count(x), 1, x.shape[-1], 0


def _count(x: Tensor) -> int:
    """Vectors in the last dimension."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


if __name__ == "__main__":
    print(f"kernels: {identity()}")
