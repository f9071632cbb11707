"""What is computed number by number, or row by row: norms, activations, gates and caps."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.head import capped
from bloomery.models.kernel_probe.inputs import ROW_COUNTS, noise
from bloomery.models.kernel_probe.recurrent import recurrence
from bloomery.models.mlp import ACTIVATIONS, gate_up_rows
from bloomery.models.per_layer import per_layer_gate
from bloomery.models.pointwise import rms_norm


def failures(decoder: Decoder, counts: Sequence[int] = ()) -> Iterator[str]:
    """Kernels compute the last few numbers of a tensor, and of what a thread has of it, in another way than those before. `counts`: of rows."""
    for part in _parts(decoder):
        rows = noise(max(part.counts), part.width, like=decoder.norm)
        whole = part.function(rows.clone())
        if not all(torch.equal(part.function(rows[:count].clone()), whole[:count]) for count in counts or part.counts):
            yield f"{part.name} depends on the number of rows"


def answers(decoder: Decoder) -> Iterator[Tensor]:
    """For every number of rows."""
    for part in _parts(decoder):
        rows_RX = noise(max(part.counts), part.width, like=decoder.norm)
        yield from (part.function(rows_RX[:count].clone()) for count in part.counts)


class _Part(NamedTuple):
    """A function of rows of a width."""

    name: str
    function: Callable[[Tensor], Tensor]
    width: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Of rows."""
        return ROW_COUNTS if self.width < 1 << 16 else ROW_COUNTS[:2]


def _parts(decoder: Decoder) -> Iterator[_Part]:
    config = decoder.config
    yield _Part("the norm", lambda rows: rms_norm(rows, decoder.norm, 1e-6), config.hidden_size)
    for inner in _inner_sizes(decoder):
        yield _Part(f"the activation of {inner} inner values", ACTIVATIONS[config.activation], gate_up_rows(inner, config.activation))
    if (mixer := recurrence(decoder)) is not None:
        inner, gated = mixer.config.inner, mixer.gated
        width = inner + mixer.config.projection_width
        yield _Part(f"the gate of a mixer, {inner} wide,", lambda rows: gated(rows[:, :inner].float(), rows[:, inner:]), width)
    if config.per_layer is not None:
        yield _Part(f"the gate of per-layer inputs, {config.per_layer.width} wide,", per_layer_gate, config.per_layer.width)
    if config.attention_gate:
        width = config.num_heads * config.head_dim
        yield _Part(f"the gate of attention, {width} wide,", torch.sigmoid, width)
    if config.logit_softcap is not None:
        yield _Part(f"the cap of {config.vocab_size} logits", lambda rows: capped(rows.float(), 1.0), config.vocab_size)


def _inner_sizes(decoder: Decoder) -> list[int]:
    """Inner values of all MLPs and experts."""
    config, experts = decoder.config, decoder.config.experts
    sizes = {config.inner(layer) for layer in range(config.num_layers) if config.has_mlp(layer)}
    if experts is not None:
        sizes |= {experts.intermediate_size, experts.shared_size}
    return sorted(sizes - {0})
