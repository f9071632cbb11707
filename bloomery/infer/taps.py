"""Where two forwards part: hidden states of a sampler and of the trainer, tapped at the same places of the same tokens.

The places are, from the bottom up: the embedding, of every layer that has an MLP what this gets (all that attention does lies before it) and what it
gives, the last norm, the head.
Shapes: R packed rows, D hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.infer.fidelity import OneModel, packed_hidden, packed_logprobs
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import Attention
from bloomery.models.block import Block
from bloomery.models.decoder import Decoder, Wanted, taken
from bloomery.models.experts import Routing
from bloomery.models.form import Form
from bloomery.models.packed import pack
from bloomery.models.pads import packed_starts
from bloomery.types.fidelity import Prompt, answers, request
from bloomery.types.generation import SamplerEvent, Weights

_ALONE = Limits(slots=1, token_budget=160)


class Difference(NamedTuple):
    """The lowest place at which they differ, and the first position that does."""

    place: str
    position: int

    def __str__(self) -> str:
        return f"{self.place}, from position {self.position} on"


def first_difference(trainer: Model, sampler: Model, prompt: Prompt, max_tokens: int, form: Form) -> Difference | None:
    """Have the sampler answer a prompt alone, and follow both forwards; None where they agree, although in company they did not."""
    theirs, ours = _Taps(), _Taps()
    # Packed here and not by the sampler, which would tap a copy.
    tapped = _Tapped(pack(sampler.decoder) if form.packed else sampler.decoder, theirs)
    engine = Sampler(tapped, OneModel(sampler._replace(decoder=tapped)), _ALONE, form=form._replace(packed=False))
    alone = request(prompt._replace(num_samples=1), Weights(version=sampler.version), max_tokens, "alone")
    events: list[SamplerEvent] = []
    engine.submit(alone)
    while engine.busy:
        events += engine.step()
    (answer,) = answers(alone, events)
    tokens, starts = answer.tokens, packed_starts([len(answer.tokens)])
    with torch.no_grad():
        hidden_RD = packed_hidden(trainer._replace(decoder=_Tapped(trainer.decoder, ours)), [tokens])
        logprobs_R1 = packed_logprobs(trainer, [tokens], hidden_RD, starts)
    for place, rows in ours.rows.items():
        for position, row_D in sorted(theirs.rows.get(place, {}).items()):
            if not torch.equal(row_D, rows[position]):
                return Difference(place, position)
    first = len(answer.prompt) - 1
    wrong = np.flatnonzero(logprobs_R1[first : len(tokens) - 1, 0].cpu().numpy() != answer.logprobs.numpy())
    return Difference("head", first + int(wrong[0])) if len(wrong) else None


class _Taps:
    """What passed at every place, from the bottom of the model up, by position."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, Tensor]] = {}
        self._positions: list[int] = []

    def fed(self, positions_R: Tensor) -> None:
        """Which positions the rows of the next forward stand for."""
        self._positions = positions_R.tolist()

    def keep(self, place: str, rows_RD: Tensor) -> None:
        """Take down the rows of one place."""
        kept = self.rows.setdefault(place, {})
        for row, (row_D, position) in enumerate(zip(rows_RD, self._positions, strict=True)):
            # Pad rows, behind the others, stand at position 0, or count on to positions that are fed later.
            if position or row == 0:
                kept[position] = row_D


class _Tapped(Decoder):
    """A decoder whose forwards are taken down."""

    def __init__(self, inner: Decoder, taps: _Taps) -> None:
        nn.Module.__init__(self)
        self.inner, self.config, self._taps = inner, inner.config, taps

    @property
    def head_weight(self) -> Tensor:
        """Of the inner one."""
        return self.inner.head_weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the inner one."""
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        """Of the inner one."""
        return self.inner.device

    def hidden(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: Attention,
        adapters: AdapterRows,
        routing: Routing | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """What the inner one gives; all rows are computed, and taken down."""
        self._taps.fed(positions_R)
        self._taps.keep("embedding", F.embedding(tokens_R, self.inner.embedding))
        mlps = [(layer, block.mlp) for layer, block in enumerate(self.inner.layers) if isinstance(block, Block) and block.mlp is not None]
        handles = [mlp.register_forward_hook(self._hook(layer)) for layer, mlp in mlps]
        try:
            hidden_RD = self.inner.hidden(tokens_R, positions_R, attention, adapters, routing)
        finally:
            for handle in handles:
                handle.remove()
        self._taps.keep("last norm", hidden_RD)
        return hidden_RD if wanted is None else taken(hidden_RD, wanted.rows)

    def _hook(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def keep(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            self._taps.keep(f"layer {layer}, attention", arguments[0])
            self._taps.keep(f"layer {layer}, mlp", output)

        return keep
