"""Products of rows with every matrix of a model, with and without an adapter, plain and packed.

Shapes: R rows, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.factors import RANK_PAD, Factors, add_updates, low_rank_add
from bloomery.models.gpu import launch
from bloomery.models.head import logsumexp
from bloomery.models.kernel_probe.inputs import FEW_ROWS, ROW_COUNTS, noise
from bloomery.models.native import gemm
from bloomery.models.products import MATRICES, can_pack, linear, packed, product
from bloomery.models.threads import one_thread

_HEAD_ROW_COUNTS: Final = ROW_COUNTS[:5]
"""Of a head with a large vocabulary: more would take longer than loading the model."""
_LARGE_HEAD: Final = 1 << 24
_SAMPLED_ROWS: Final = 708
"""The most that a packed matrix is multiplied with."""
_MEMBER: Final = 20
"""Rows of each run in a pass of three."""


class Examined(NamedTuple):
    """What all matrices have in common."""

    failures: tuple[str, ...]
    packs: bool
    """Packed weights give the bits of plain ones."""
    padless: bool
    """Fewer rows than `ROW_PAD` have the bits that they have among many."""
    one_thread: bool
    """One thread gives the bits of all."""


def examine(decoder: Decoder) -> Examined:
    """Try each matrix, one at a time: what many rows give with it is as large as the matrix."""
    failures: list[str] = []
    packs, alone, padless = can_pack(decoder.dtype, decoder.device), True, _may_have_no_pads(decoder)
    for matrix in _matrices(decoder):
        failures += _failures(matrix)
        packs = packs and _packs(matrix)
        padless = padless and _equal_for(matrix, FEW_ROWS)
        with one_thread():
            alone = alone and not list(_failures(matrix)) and (not packs or _packs(matrix))
    return Examined(tuple(failures), packs, padless, alone)


def _may_have_no_pads(decoder: Decoder) -> bool:
    """Whether a row may have its bits alone: with products of our own, in models of attention and MLPs and nothing else."""
    own = gemm.multiplies(decoder.embedding) or launch.available(decoder.embedding)
    return own and decoder.config.recurrent is None and decoder.config.experts is None


class _Matrix(NamedTuple):
    """A matrix of products, and what many rows give with it and with an adapter on it."""

    name: str
    weight: Tensor
    factors: Factors
    rows_RI: Tensor
    counts: tuple[int, ...]
    update: "_Update"
    answers: "_Answers"


_Update = Callable[[Tensor, Tensor, Factors], Tensor]
"""How factors are added to a product of rows: of experts otherwise than elsewhere."""


class _Answers(NamedTuple):
    base_RO: Tensor
    adapted_RO: Tensor
    logsumexp_R: Tensor

    def equal(self, others: "_Answers") -> bool:
        """Whether the first rows of the others have these bits."""
        return all(torch.equal(mine, theirs[: len(mine)]) for mine, theirs in zip(self, others, strict=True))


def _matrices(decoder: Decoder) -> Iterator[_Matrix]:
    """One of each shape and dtype of a product, those of experts included; the head comes last."""
    weights: dict[str, Tensor] = {name: weight for name, weight in decoder.named_parameters() if name.rpartition(".")[2] in MATRICES}
    by_form = {(weight.shape[-2:], _product_dtype(decoder, name)): (name, weight) for name, weight in reversed(weights.items())}
    head = decoder.head_weight
    by_form.pop((head.shape, head.dtype), None)
    by_form[head.shape, head.dtype] = "head", head
    for (_, dtype), (name, stored) in by_form.items():
        weight = (stored if stored.dim() == 2 else stored[0]).to(dtype)
        counts = _HEAD_ROW_COUNTS if name == "head" and head.numel() >= _LARGE_HEAD else ROW_COUNTS
        factors = Factors(noise(RANK_PAD, weight.shape[1], like=weight), noise(weight.shape[0], RANK_PAD, like=weight))
        rows_RI = noise(max(counts), weight.shape[1], like=weight)
        update = _updated if stored.dim() == 2 else low_rank_add
        yield _Matrix(name, weight, factors, rows_RI, counts, update, _projected(rows_RI, weight, factors, update))


def _product_dtype(decoder: Decoder, name: str) -> torch.dtype:
    """Routers that score every expert by itself do so in float32, whatever the dtype of the model."""
    experts = decoder.config.experts
    return torch.float32 if experts is not None and experts.scoring == "sigmoid" and name.endswith(".router") else decoder.dtype


def _failures(matrix: _Matrix) -> Iterator[str]:
    name, weight, factors, rows_RI, counts, *_ = matrix
    if not _equal_for(matrix, counts[:-1]):
        yield f"the product with `{name}` {list(weight.shape)} depends on the number of rows"
    alone = _updated(linear(rows_RI[:_MEMBER], weight), rows_RI[:_MEMBER], factors)
    if not torch.equal(_updated_in_a_batch(rows_RI, weight, factors, members=3), alone):
        yield f"an adapter's update of `{name}` {list(weight.shape)} depends on those computed beside it"


def _equal_for(matrix: _Matrix, counts: Sequence[int]) -> bool:
    """Whether so many rows have the bits that they have among all."""
    parts = (_projected(matrix.rows_RI[:count], matrix.weight, matrix.factors, matrix.update) for count in counts)
    return all(part.equal(matrix.answers) for part in parts)


def _packs(matrix: _Matrix) -> bool:
    """Whether it gives the same bits when it is packed."""
    order = packed(matrix.weight)
    counts = [count for count in matrix.counts if count <= _SAMPLED_ROWS]
    if not all(torch.equal(product(matrix.rows_RI[:count], order), matrix.answers.base_RO[:count]) for count in counts):
        return False
    with one_thread():
        return torch.equal(product(matrix.rows_RI[: counts[0]], order), matrix.answers.base_RO[: counts[0]])


def _projected(rows_RI: Tensor, weight: Tensor, factors: Factors, update: _Update) -> _Answers:
    base_RO = linear(rows_RI, weight)
    return _Answers(base_RO, update(base_RO, rows_RI, factors), logsumexp(base_RO.float()))


def _updated(base_RO: Tensor, rows_RI: Tensor, factors: Factors) -> Tensor:
    out_RO = base_RO.clone()
    add_updates(out_RO, rows_RI, [factors])
    return out_RO


def _updated_in_a_batch(rows_RI: Tensor, weight: Tensor, factors: Factors, members: int) -> Tensor:
    """The first of some members, with rows of their own and the same factors, as a pass of several runs computes them."""
    rows_RI = rows_RI[: members * _MEMBER]
    out_RO = linear(rows_RI, weight)
    add_updates(out_RO, rows_RI, [factors] * members)
    return out_RO[:_MEMBER]
