"""Which matrices of a model an adapter can be on."""

from typing import Final, NamedTuple

from bloomery.models.config import DecoderConfig
from bloomery.models.names import projections

UNEMBED: Final = "unembed_tokens"
"""The head."""


class TargetShape(NamedTuple):
    """Of a target's weight."""

    experts: int
    """0 where it is one matrix."""
    inputs: int
    outputs: int


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
