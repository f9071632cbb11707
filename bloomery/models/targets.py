"""Which matrices of a model an adapter can be on, and where they lie in the decoder's own parameters."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from bloomery.models.config import DecoderConfig
from bloomery.models.names import Projection, projections

UNEMBED: Final = "unembed_tokens"
"""The head, be it the embedding or not: what it is called as a target, and as the parameter that it lies in."""


class Target(NamedTuple):
    """A matrix of the published model: some rows of a parameter of ours, all of them where nothing is fused with it."""

    parameter: str
    """As the decoder calls it: `layers.0.mlp.gate_up`."""
    parameter_rows: int
    first_row: int
    outputs: int
    inputs: int
    experts: int = 0
    """0 where it is one matrix."""

    @property
    def rows(self) -> slice:
        """Of the parameter."""
        return slice(self.first_row, self.first_row + self.outputs)

    @property
    def lead(self) -> tuple[int, ...]:
        """First dimensions of whatever is one of experts."""
        return (self.experts,) if self.experts else ()

    def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `a` and of `b`."""
        return (*self.lead, rank, self.inputs), (*self.lead, self.outputs, rank)


def adapter_targets(config: DecoderConfig, *, attention: bool = True, mlp: bool = True, unembed: bool = True) -> dict[str, Target]:
    """Targets by stored name (`layers.0.self_attn.q_proj`), in a fixed order."""
    targets: dict[str, Target] = {}
    for layer in range(config.num_layers):
        found = list(projections(config, layer))
        for projection in found:
            if projection.adapted and (attention if projection.part == "attn" else mlp):
                targets[f"layers.{layer}.{projection.module}.{projection.name}"] = _target(layer, projection, found)
    if unembed:
        targets[UNEMBED] = Target(UNEMBED, config.vocab_size, 0, config.vocab_size, config.hidden_size)
    return targets


def _target(layer: int, projection: Projection, beside: Sequence[Projection]) -> Target:
    """Among all projections of its layer, whose rows fill the parameters of that."""
    rows = sum(each.outputs for each in beside if each.parameter == projection.parameter)
    parameter = f"layers.{layer}.{projection.parameter}"
    return Target(parameter, rows, projection.first_row, projection.outputs, projection.inputs, projection.experts)
