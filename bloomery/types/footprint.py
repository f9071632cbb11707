"""Memory of a run that trains all parameters of a model: known before it begins, by whoever admits it and by the engine that holds it."""

from typing import Final

from bloomery.types.errors import InvalidInput
from bloomery.types.operations import LoraSpec

HELD_BYTES: Final = 16
"""Per trained parameter, all in fp32: the master, its gradient, and both moments of the optimizer."""
PASS_BYTES: Final = 4
"""Per trained parameter: what the forward computes with, where that is not the master itself, and the gradient that a backward leaves there."""
COPY_BYTES: Final = 2
"""Per trained parameter: of that, what stays between two passes."""
CHECKPOINT_BYTES: Final = 16
"""Per trained parameter, while a checkpoint is written between two passes: the master, both moments, and the gradient where that waits for a step."""
PARTS: Final = ("attn", "mlp", "unembed")


def full_run_bytes(trained_parameters: int) -> int:
    """At the most, beside the base model and the activations of a micro-batch, in every compute dtype."""
    return trained_parameters * (HELD_BYTES + max(PASS_BYTES, COPY_BYTES + CHECKPOINT_BYTES))


def check_room(trained_parameters: int, free_bytes: int) -> None:
    """Refuse a run that does not fit into the memory that is free."""
    needs = full_run_bytes(trained_parameters)
    if needs > free_bytes:
        raise InvalidInput(
            f"a run that trains {trained_parameters} parameters (rank 0) needs {needs} bytes of memory, {free_bytes} are free: "
            f"train an adapter (rank 1 or more) or fewer parts of the model, or unload other runs",
            field="rank",
        )


def trained_parts(spec: LoraSpec) -> tuple[str, ...]:
    """Which parts of the model a run trains."""
    chosen = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    return tuple(part for part in PARTS if chosen[part])
