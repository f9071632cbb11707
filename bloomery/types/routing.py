"""The routing of a mixture of experts: what shape it has in a model, and whether a given one is of that shape.

A routing of N tokens is int [N, L, T]: for each of the L sparse layers the T experts that a token is sent to. -1 in all T places leaves the router
free. Its weights are float32 [N, L, T]: what the answer of each of these experts is multiplied with, 0 where the router is free.
"""

from typing import Final, NamedTuple

import numpy as np

from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput


class RoutingShape(NamedTuple):
    """Of one model."""

    sparse_layers: tuple[int, ...]
    top_k: int
    experts: int
    signed_weights: bool = False
    """Whether weights may be negative."""


def check_routing(routing: Array, tokens: int, shape: RoutingShape | None, field: str) -> None:
    """Refuse what does not say for every token where each sparse layer sends it."""
    if shape is None:
        raise InvalidInput(f"`{field}`: this model has no experts to route to, leave it out", field=field)
    expected = _expected(tokens, shape)
    if routing.dtype == "float32" or routing.shape != expected:
        raise InvalidInput(f"`{field}` is {routing.dtype}{list(routing.shape)}, expected integers {list(expected)}: {_AXES}", field=field)
    chosen = np.sort(routing.numpy(), axis=-1)
    free = (chosen == -1).all(-1)
    if (chosen[~free] < 0).any() or (chosen >= shape.experts).any():
        raise InvalidInput(f"`{field}` names experts from 0 to {shape.experts - 1}, or -1 for all of a layer", field=field)
    if (chosen[~free][:, 1:] == chosen[~free][:, :-1]).any():
        others = f"name {shape.top_k} different ones, or -1 for all of a layer"
        raise InvalidInput(f"`{field}` sends a token to one expert twice in one layer: {others}", field=field)


def check_routing_weights(weights: Array, routing: Array | None, tokens: int, shape: RoutingShape | None, field: str) -> None:
    """Refuse what does not say for every expert of a routing, which was checked before, how much its answer counts."""
    if shape is None:
        raise InvalidInput(f"`{field}`: this model has no experts to weigh, leave it out", field=field)
    if routing is None:
        raise InvalidInput(f"`{field}` weighs experts that are not named: send the `routing` that they were told with, or leave it out", field=field)
    expected = _expected(tokens, shape)
    if weights.dtype != "float32" or weights.shape != expected:
        raise InvalidInput(f"`{field}` is {weights.dtype}{list(weights.shape)}, expected float32{list(expected)}: {_AXES}", field=field)
    values = weights.numpy()
    if not (fits := np.abs(values) <= _MOST).all():
        problem = f"`{field}` holds {values[~fits][0]}, which is not finite in bfloat16"
        raise InvalidInput(f"{problem}: send the weights as they were told, 0 where the router is free", field=field)
    if not shape.signed_weights and (values < 0).any():
        raise InvalidInput(f"`{field}` holds {values.min():g}: the weights of this model's experts are at least 0", field=field)
    if values[routing.numpy() == -1].any():
        raise InvalidInput(f"`{field}` weighs experts where `routing` leaves the router free: give 0 there, or name the experts", field=field)


_AXES: Final = "tokens, sparse layers, experts of each token there"
_MOST: Final = float.fromhex("0x1.fep127")
"""The largest number of bfloat16, in which many models compute."""


def _expected(tokens: int, shape: RoutingShape) -> tuple[int, int, int]:
    return tokens, len(shape.sparse_layers), shape.top_k
