"""The decoder core: config-driven blocks for all families, over packed rows.

Shapes: R packed rows, V vocabulary, D hidden, O numbers that a mixer gathers for a row, P of a layer's own input, C rows that are wanted.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import Attention
from bloomery.models.block import Block, Shared, make_block, norm
from bloomery.models.config import DecoderConfig
from bloomery.models.experts import Routing
from bloomery.models.per_layer import PerLayerInputs
from bloomery.models.rests import rest
from bloomery.models.rope import Rope, Rotation
from bloomery.models.targets import Target, adapter_targets


class Inputs(NamedTuple):
    """What every row brings along: its embedding, and how it is turned in layers with a window, or without one."""

    x_RD: Tensor
    rotation: Rotation
    full_rotation: Rotation
    extras: Sequence[Tensor | None]
    """Per-layer inputs [R, P], of models that have these."""

    def take_over(self, others: "Inputs") -> None:
        """The numbers of as many rows, in the memory that is here."""
        for own, other in zip(self._tensors, others._tensors, strict=True):
            own.copy_(other)

    @property
    def _tensors(self) -> list[Tensor]:
        full_rotation = () if self.full_rotation is self.rotation else self.full_rotation
        return [each for each in (self.x_RD, *self.rotation, *full_rotation, *self.extras) if isinstance(each, Tensor)]


class Trunk(NamedTuple):
    """Everything that rows tell each other: the residual `x_RD` and the last block's attention `mixed_RO`, before its output projection."""

    x_RD: Tensor
    mixed_RO: Tensor
    extra_RP: Tensor | None
    """The last block's per-layer input, of models that have these."""

    def rows(self, rows: slice | Tensor) -> "Trunk":
        """Of these rows alone."""
        return Trunk(taken(self.x_RD, rows), taken(self.mixed_RO, rows), None if self.extra_RP is None else taken(self.extra_RP, rows))


def taken(x_RD: Tensor, rows: slice | Tensor) -> Tensor:
    """These rows; neighbours where they lie."""
    return x_RD[rows] if isinstance(rows, slice) else x_RD.index_select(0, rows)


class Wanted(NamedTuple):
    """The rows whose hidden states are of use, and whose adapter applies to which of them; a multiple of `ROW_PAD` where bits matter."""

    rows: slice | Tensor
    """Neighbours, or the numbers [C] of rows that are not."""
    adapters: AdapterRows


class Decoder(nn.Module):
    """Token embedding, blocks and final norm; the head is `head_weight` for the functions of `head.py`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
            self.per_layer = None if config.per_layer is None else PerLayerInputs(config, config.per_layer, dtype)
            self.layers = nn.ModuleList(make_block(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))
            self.head = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.rope = Rope(config.rope, config.head_dim)
        self.full_rope = self.rope if config.full_rope is None else Rope(config.full_rope, config.head_dim)

    @property
    def head_weight(self) -> Tensor:
        """The unembedding [V, D]."""
        return self.embedding if self.head is None else self.head

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.device

    @cached_property
    def targets(self) -> Mapping[str, Target]:
        """Every matrix that an adapter can be on."""
        return adapter_targets(self.config)

    @property
    def ends_sparse(self) -> bool:
        """Whether the last block has experts."""
        return self._blocks[-1].feed_forward in ("experts", "both")

    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Hidden states [R, D] after the final norm, or [C, D] of the wanted rows; `routing` keeps, or says, which experts the rows go to."""
        return self.hidden_of(self.inputs(tokens_R, positions_R), attention, adapters, routing, wanted)

    def hidden_of(
        self, inputs: Inputs, attention: Attention, adapters: AdapterRows, routing: Routing | None = None, wanted: Wanted | None = None
    ) -> Tensor:
        """The same of what the rows bring along."""
        routing = Routing() if routing is None else routing
        trunk = self.trunk(inputs, attention, adapters, routing)
        if wanted is None:
            return self.finish(trunk, adapters, routing)
        if self.ends_sparse:
            # Where a row goes is told of all of them.
            return taken(self.finish(trunk, adapters, routing), wanted.rows)
        trunk = trunk.rows(wanted.rows)
        return self.finish(trunk, wanted.adapters, routing) if len(trunk.x_RD) else trunk.x_RD

    def inputs(self, tokens_R: Tensor, positions_R: Tensor) -> Inputs:
        """Of these tokens at these positions."""
        x_RD = self._embedded(tokens_R)
        rotation = self.rope(positions_R, x_RD.dtype)
        full_rotation = rotation if self.full_rope is self.rope else self.full_rope(positions_R, x_RD.dtype)
        extras = [None] * len(self.layers) if self.per_layer is None else self.per_layer(tokens_R, x_RD).unbind(1)
        return Inputs(x_RD, rotation, full_rotation, extras)

    def trunk(self, inputs: Inputs, attention: Attention, adapters: AdapterRows, routing: Routing) -> Trunk:
        """As far as a row depends on others; the rest is for `finish`, and for the rows alone whose hidden states are wanted."""
        x_RD, rotation, full_rotation, extras = inputs
        shared: Shared = {}
        for block, extra_RP in zip(self._blocks[:-1], extras, strict=False):
            x_RD = block(x_RD, full_rotation if block.window is None else rotation, attention, adapters, routing, shared, extra_RP)
            rest()
        last = self._blocks[-1]
        return Trunk(x_RD, last.mix(x_RD, full_rotation if last.window is None else rotation, attention, adapters, shared), extras[-1])

    def finish(self, trunk: Trunk, adapters: AdapterRows, routing: Routing) -> Tensor:
        """Hidden states of the trunk's rows, after the last block and the final norm."""
        x_RD = self._blocks[-1].finish(trunk.x_RD, trunk.mixed_RO, adapters, routing, trunk.extra_RP)
        return norm(x_RD, self.norm, self.config)

    @property
    def _blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]

    def _embedded(self, tokens_R: Tensor) -> Tensor:
        x_RD = F.embedding(tokens_R, self.embedding)
        # The factor is one of the compute dtype, as the families that have it compute.
        return x_RD if self.config.embedding_scale == 1.0 else x_RD * torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()
