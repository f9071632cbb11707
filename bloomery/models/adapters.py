"""Low-rank adapters: factors of each projection, and the fused form that the forward applies to ranges of rows.

Shapes: R rows, I inputs, O outputs, r rank padded to a multiple of `RANK_PAD`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from bloomery.models import native
from bloomery.models.config import DecoderConfig
from bloomery.models.names import projections
from bloomery.models.pads import pad_to
from bloomery.models.products import linear, product, rows_gradient

RANK_PAD = 16
"""The forward computes with ranks padded to this multiple: narrower ones change the bits of a row with the width."""

_KEPT_PASSES: Final = 16
"""A few steps, in which prompts of others are computed too, and whole models one after the other."""

UNEMBED = "unembed_tokens"
PUBLISHED_PREFIX = "base_model.model.model."
_OWN_EXPERTS = re.compile(r"\.(mlp|mixer)\.")
_PUBLISHED_EXPERTS = re.compile(r"\.(mlp|mixer)\.experts\.")


class Factors(NamedTuple):
    """One projection's update `scale * B @ A`: `a` [r, I] and `b` [O, r]; experts carry a leading dimension."""

    a: Tensor
    b: Tensor


class TargetShape(NamedTuple):
    """Of a target's weight."""

    experts: int
    """0 where it is one matrix."""
    inputs: int
    outputs: int


class FusedAdapter:
    """One adapter as the forward uses it: for each fused projection the joined `a` and the scaled block-diagonal `b`, zeros around the factors.

    A run fills it after every step and finds the gradients of a backward in it; the sampler fills one per version.
    """

    def __init__(
        self, shapes: Mapping[str, TargetShape], rank: int, scale: float, *, dtype: torch.dtype, device: torch.device | str, trained: bool = False
    ) -> None:
        self._scale = scale
        self._blocks = _blocks(shapes, rank)
        self._fused: dict[str, Factors] = {}
        for target, shape in shapes.items():
            projection = self._blocks[target].projection
            blocks = [block for block in self._blocks.values() if block.projection == projection]
            lead, width = (shape.experts,) if shape.experts else (), padded_rank(rank) * len(blocks)
            sizes = (*lead, width, shape.inputs), (*lead, max(block.outputs.stop for block in blocks), width)
            a, b = (_zeros(size, dtype, torch.device(device)).requires_grad_(trained) for size in sizes)
            self._fused.setdefault(projection, Factors(a, b))

    def get(self, projection: str) -> Factors | None:
        """The fused factors of a projection such as `layers.0.qkv`, or None where the adapter has none."""
        return self._fused.get(projection)

    @property
    def tensors(self) -> list[Tensor]:
        """All fused factors."""
        return [tensor for pair in self._fused.values() for tensor in pair]

    def fill(self, target: str, factors: Factors) -> None:
        """Take over a target's factors, unpadded."""
        block = self._blocks[target]
        with torch.no_grad():
            a, b = block.of(self._fused[block.projection])
            a.copy_(factors.a)
            b.copy_(factors.b).mul_(self._scale)

    def gradients(self, target: str) -> Factors | None:
        """What backwards left for a target's factors, unpadded and not yet scaled by `scale`; None where none did."""
        block = self._blocks[target]
        a, b = self._fused[block.projection]
        return None if a.grad is None or b.grad is None else block.of(Factors(a.grad, b.grad))

    def copy(self) -> "FusedAdapter":
        """One with the same numbers, which may change while this one is in use."""
        twin = copy(self)
        twin._fused = {projection: Factors(pair.a.detach().clone(), pair.b.detach().clone()) for projection, pair in self._fused.items()}
        return twin

    def factors(self) -> dict[str, "ScaledView"]:
        """Every factor by its published name (`published_factor`), unpadded."""
        found: dict[str, ScaledView] = {}
        for target, block in self._blocks.items():
            a, b = block.of(self._fused[block.projection])
            found[f"{target}.lora_A"], found[f"{target}.lora_B"] = ScaledView(a, 1.0), ScaledView(b, self._scale)
        return found

    def num_stray(self) -> int:
        """Numbers around the factors that are not zero, though they are multiplied with; of a zero with a sign too."""
        return sum(map(_num_set, self.tensors)) - sum(_num_set(view.values) for view in self.factors().values())


class ScaledView(NamedTuple):
    """A factor where the forward uses it: there its published values are multiplied by `scale`."""

    values: Tensor
    scale: float


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix that is to be multiplied with, its columns in one piece where the kernels read them so."""
    if len(size) == 2 and native.multiplies(torch.empty(0, dtype=dtype, device=device)):
        return torch.zeros(size[::-1], dtype=dtype, device=device).t()
    return torch.zeros(size, dtype=dtype, device=device)


def _num_set(tensor: Tensor) -> int:
    bits = torch.int16 if tensor.element_size() == 2 else torch.int32
    return int(tensor.detach().contiguous().view(bits).count_nonzero())


def published_name(factor: str, *, stacked: bool) -> str:
    """What a published adapter, and PEFT, call a factor of ours; `stacked` says that it is one of experts."""
    own = _OWN_EXPERTS.sub(r".\1.experts.", factor) if stacked else factor
    return f"{PUBLISHED_PREFIX}{own}.weight"


def published_factor(name: str) -> str:
    """Our name of a factor (`layers.0.self_attn.q_proj.lora_A`) from that in a published adapter, which PEFT uses too."""
    return _PUBLISHED_EXPERTS.sub(r".\1.", name.removeprefix(PUBLISHED_PREFIX)).removesuffix(".weight")


def fuse(factors: Mapping[str, Factors], scale: float) -> FusedAdapter:
    """The adapter of these factors by target, all of one rank."""
    shapes = {name: TargetShape(a.shape[0] if a.dim() == 3 else 0, a.shape[-1], b.shape[-2]) for name, (a, b) in factors.items()}
    like = next((pair.a for pair in factors.values()), torch.zeros(1, 1))
    fused = FusedAdapter(shapes, like.shape[-2], scale, dtype=like.dtype, device=like.device)
    for target, pair in factors.items():
        fused.fill(target, pair)
    return fused


class Bank:
    """Stacked factors of the adapters that were together in the last passes: those of a batch stay together for many steps of decoding.

    For adapters that nobody fills any more, and it keeps none of them alive. What `_KEPT_PASSES` did not use goes, and what was made of an adapter
    goes with it; so it holds as much again as those adapters take that were in these passes.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], _Stacked] = {}
        self._passes = 0

    def begin_pass(self) -> None:
        """Whatever is asked for from here on is of a new pass."""
        self._passes += 1
        for place in [place for place, held in self._held.items() if held.used_in < self._passes - _KEPT_PASSES]:
            del self._held[place]

    def clear(self) -> None:
        """Forget them all."""
        self._held.clear()

    def stacked(self, projection: str, place: int, members: Sequence[Factors]) -> Factors:
        """The factors of the team at `place` among those of a projection, `a` [M, r, I] and `b` [M, O, r]."""
        held = self._held.get((projection, place))
        factors = None if held is None else held.of(members)
        if held is None or factors is None:
            factors = _stack(members)
            held = self._held[projection, place] = _Stacked(members, factors)
        held.used_in = self._passes
        return factors


class _Stacked:
    """Factors of a team in one piece, until one of its members is gone."""

    def __init__(self, members: Sequence[Factors], factors: Factors) -> None:
        mine = ref(self)

        def free(_: object) -> None:
            # On any thread, and perhaps while the bank is looked through: its place stays.
            if (stacked := mine()) is not None:
                stacked._factors = None

        self.used_in = 0
        """The last pass that asked for it."""
        self._members = [ref(each.a, free) for each in members]
        self._factors: Factors | None = factors

    def of(self, members: Sequence[Factors]) -> Factors | None:
        """The factors, if they are those of these members: compared by what they are made of, not by value."""
        alike = len(self._members) == len(members) and all(old() is new.a for old, new in zip(self._members, members, strict=True))
        return self._factors if alike else None


class AdapterRows(NamedTuple):
    """Which adapter applies to which rows: contiguous ranges that cover all rows, each start and stop a multiple of `ROW_PAD` where bits matter."""

    segments: tuple[tuple[FusedAdapter | None, int, int], ...]
    bank: Bank | None = None
    """Where stacked factors outlive a pass."""


def target_shapes(config: DecoderConfig, *, attention: bool, mlp: bool, unembed: bool) -> dict[str, TargetShape]:
    """Targets by stored name (`layers.0.self_attn.q_proj`), in a fixed order."""
    shapes: dict[str, TargetShape] = {}
    for layer in range(config.num_layers):
        for projection in projections(config, layer):
            if projection.adapted and (attention if projection.part == "attn" else mlp):
                target = f"layers.{layer}.{projection.module}.{projection.name}"
                shapes[target] = TargetShape(projection.experts, projection.inputs, projection.outputs)
    if unembed:
        shapes[UNEMBED] = TargetShape(0, config.hidden_size, config.vocab_size)
    return shapes


def padded_rank(rank: int) -> int:
    """The rank that is computed with: the next multiple of `RANK_PAD`."""
    return pad_to(rank, RANK_PAD)


def adapted_linear(input_RI: Tensor, weight_OI: Tensor, projection: str, rows: AdapterRows) -> Tensor:
    """A projection of the base [R, O] with every segment's low-rank update; with an adapter anywhere the weight gets no gradient."""
    teams, flat = _teams(rows, projection)
    if not teams:
        return linear(input_RI, weight_OI)
    if not torch.is_grad_enabled():
        return _adapted(input_RI, weight_OI, teams, flat, projection, rows.bank)[0]
    out_RO: Tensor = _AdaptedLinear.apply(input_RI, weight_OI, teams, *flat)  # type: ignore[no-untyped-call]
    return out_RO


def add_updates(out_RO: Tensor, input_RI: Tensor, members: Sequence[Factors], stacked: Callable[[], Factors] | None = None) -> Tensor:
    """`out += (input @ a.T) @ b.T` in place, for as many neighbouring rows with each member's factors; returns `input @ a.T` [R, r].

    A member's rows have the same bits whatever is beside them. `stacked` gives the factors in one piece, for kernels that take them so.
    """
    if native.multiplies(out_RO, input_RI):
        return native.add_updates(out_RO, input_RI, members)
    if len(members) == 1:
        # The fewest calls, which is what a step of few rows waits for.
        low_Rr = torch.nn.functional.linear(input_RI, members[0].a)
        out_RO.addmm_(low_Rr, members[0].b.t())
        return low_Rr
    a_MrI, b_MOr = _stack(members) if stacked is None else stacked()
    low_MNr = torch.bmm(input_RI.unflatten(0, (len(members), -1)), a_MrI.transpose(1, 2))
    out_RO.unflatten(0, (len(members), -1)).baddbmm_(low_MNr, b_MOr.transpose(1, 2))
    return low_MNr.flatten(0, 1)


class _Team(NamedTuple):
    """Neighbouring segments with as many rows and factors of the same shape: their small products are computed together."""

    start: int
    stop: int
    members: int

    @property
    def rows(self) -> slice:
        """Of all its members."""
        return slice(self.start, self.stop)

    def of(self, rows_RX: Tensor) -> Tensor:
        """Its own rows [M, rows of a member, X], a view."""
        own_MNX: Tensor = rows_RX[self.start : self.stop].unflatten(0, (self.members, -1))
        return own_MNX


def _teams(rows: AdapterRows, projection: str) -> tuple[list[_Team], list[Tensor]]:
    """The teams of a pass, and their factors, `a` and `b` of one segment after the other."""
    teams: list[_Team] = []
    flat: list[Tensor] = []
    for adapter, start, stop in rows.segments:
        if start == stop or adapter is None or (factors := adapter.get(projection)) is None:
            continue
        if teams and _joins(teams[-1], start, stop) and factors.a.shape == flat[-2].shape:
            teams[-1] = teams[-1]._replace(stop=stop, members=teams[-1].members + 1)
        else:
            teams.append(_Team(start, stop, 1))
        flat += factors
    return teams, flat


def _joins(team: _Team, start: int, stop: int) -> bool:
    return team.stop == start and (stop - start) * team.members == team.stop - team.start


class _AdaptedLinear(torch.autograd.Function):
    """One product for all rows, and small ones added in place: autograd's own nodes would copy every activation once per segment.

    Shapes: M members of a team, N rows of each. A batch of products has the bits of each alone; `kernel_probe` holds that against this machine.
    """

    @staticmethod
    def forward(ctx: Any, input_RI: Tensor, weight_OI: Tensor, teams: Sequence[_Team], *flat: Tensor) -> Tensor:
        out_RO, lows = _adapted(input_RI, weight_OI, teams, flat)
        ctx.teams = teams
        ctx.save_for_backward(input_RI, weight_OI, *lows, *flat)
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_RO, teams = grads[0], ctx.teams
        input_RI, weight_OI, *saved = ctx.saved_tensors
        grad_RI = rows_gradient(grad_RO, weight_OI) if ctx.needs_input_grad[0] else None
        grad_flat: list[Tensor] = []
        for team, low_Rr, members in zip(teams, saved, _members(teams, saved[len(teams) :]), strict=False):
            if native.multiplies(grad_RO, input_RI):
                own_grad_RI = None if grad_RI is None else grad_RI[team.rows]
                pairs = native.update_gradients(grad_RO[team.rows], input_RI[team.rows], low_Rr, members, own_grad_RI)
                grad_flat += [grad for pair in pairs for grad in pair]
                continue
            (a_MrI, b_MOr), low_MNr, grad_MNO = _stack(members), low_Rr.unflatten(0, (team.members, -1)), team.of(grad_RO)
            grad_low_MNr = torch.bmm(grad_MNO, b_MOr)
            if grad_RI is not None:
                team.of(grad_RI).baddbmm_(grad_low_MNr, a_MrI)
            grad_a_MrI = torch.bmm(grad_low_MNr.transpose(1, 2), team.of(input_RI))
            grad_b_MOr = torch.bmm(grad_MNO.transpose(1, 2), low_MNr)
            grad_flat += [grad for pair in zip(grad_a_MrI, grad_b_MOr, strict=True) for grad in pair]
        return grad_RI, None, None, *grad_flat


def _adapted(
    input_RI: Tensor, weight_OI: Tensor, teams: Sequence[_Team], flat: Sequence[Tensor], projection: str = "", bank: Bank | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The forward, and what every team's rows are between the factors."""
    out_RO = product(input_RI, weight_OI)
    lows = []
    for place, (team, members) in enumerate(zip(teams, _members(teams, flat), strict=True)):
        stacked = None if bank is None else partial(bank.stacked, projection, place, members)
        lows.append(add_updates(out_RO[team.rows], input_RI[team.rows], members, stacked))
    return out_RO, lows


def _members(teams: Sequence[_Team], flat: Sequence[Tensor]) -> Iterator[list[Factors]]:
    """The factors of every team, of one member after the other."""
    first = 0
    for team in teams:
        own = flat[first : first + 2 * team.members]
        first += len(own)
        yield [Factors(a, b) for a, b in zip(own[::2], own[1::2], strict=True)]


def _stack(members: Sequence[Factors]) -> Factors:
    """`a` [M, r, I] and `b` [M, O, r], each matrix in the layout that it has alone: libraries have another kernel for another layout."""
    if len(members) == 1:
        return Factors(members[0].a[None], members[0].b[None])
    return Factors(*map(_stack_matrices, zip(*members, strict=True)))


def _stack_matrices(matrices: Sequence[Tensor]) -> Tensor:
    if matrices[0].is_contiguous():
        return torch.stack(list(matrices))
    return torch.stack([matrix.t() for matrix in matrices]).transpose(1, 2)


def low_rank_add(base_RO: Tensor, input_RI: Tensor, factors: Factors) -> Tensor:
    """`base + (input @ a.T) @ b.T` in the one order of operations that training and sampling share."""
    return torch.addmm(base_RO, torch.nn.functional.linear(input_RI, factors.a), factors.b.t())


_FUSED_ORDER = {
    **{"q_proj": 0, "k_proj": 1, "v_proj": 2},
    **{"q_a_proj": 0, "kv_a_proj_with_mqa": 1},
    **{"in_proj_qkv": 0, "in_proj_b": 1, "in_proj_a": 2, "in_proj_z": 3},
    **{"gate_proj": 0, "up_proj": 1},
}
_FUSED_NAME = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_a_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "q_b_proj": "q_b",
    "kv_b_proj": "kv_b",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "in_proj": "qkv",
    **dict.fromkeys(("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"), "qkv"),
    "out_proj": "o",
    "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
}
_OWN_NAME = {"experts": ".experts", "shared_experts": ".shared", "shared_expert": ".shared"}
"""Modules whose projections are called as others of their layer, and what tells them apart."""


class _Block(NamedTuple):
    """Where a target's factors lie in the fused ones of its projection."""

    projection: str
    ranks: slice
    outputs: slice

    def of(self, fused: Factors) -> Factors:
        """Its own part."""
        return Factors(fused.a[..., self.ranks, :], fused.b[..., self.outputs, self.ranks])


def _blocks(shapes: Mapping[str, TargetShape], rank: int) -> dict[str, _Block]:
    blocks: dict[str, _Block] = {}
    ends: dict[str, tuple[int, int]] = {}
    for target in sorted(shapes, key=lambda name: _FUSED_ORDER.get(name.rpartition(".")[2], 0)):
        # `layers.0.mlp.shared_experts.up_proj`: the layer, its module, and the projection.
        head, _, leaf = target.rpartition(".")
        module = head.rpartition(".")[2]
        layer = ".".join(head.split(".")[:2])
        projection = f"{layer}{_OWN_NAME.get(module, '')}.{_FUSED_NAME[leaf]}" if head else target
        ranks, outputs = ends.get(projection, (0, 0))
        end = outputs + shapes[target].outputs
        blocks[target] = _Block(projection, slice(ranks, ranks + rank), slice(outputs, end))
        ends[projection] = (ranks + padded_rank(rank), end)
    return blocks
