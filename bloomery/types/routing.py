"""The routing of a mixture of experts: what shape it has in a model, and whether a given one is of that shape.

A routing of N tokens is int [N, L, T]: for each of the L sparse layers the T experts that a token is sent to. -1 in all T places leaves the router
free.
"""

from typing import NamedTuple

import numpy as np

from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput


class RoutingShape(NamedTuple):
    """Of one model."""

    sparse_layers: tuple[int, ...]
    top_k: int
    experts: int


def check_routing(routing: Array, tokens: int, shape: RoutingShape | None, field: str) -> None:
    """Refuse what does not say for every token where each sparse layer sends it."""
    if shape is None:
        raise InvalidInput(f"`{field}`: this model has no experts to route to, leave it out", field=field)
    expected = (tokens, len(shape.sparse_layers), shape.top_k)
    if routing.dtype == "float32" or routing.shape != expected:
        raise InvalidInput(f"`{field}` is {routing.dtype}{list(routing.shape)}, expected integers {list(expected)}", field=field)
    chosen = np.sort(routing.numpy(), axis=-1)
    free = (chosen == -1).all(-1)
    if (chosen[~free] < 0).any() or (chosen >= shape.experts).any():
        raise InvalidInput(f"`{field}` names experts from 0 to {shape.experts - 1}, or -1 for all of a layer", field=field)
    if (chosen[~free][:, 1:] == chosen[~free][:, :-1]).any():
        raise InvalidInput(f"`{field}` sends a token to one expert twice in one layer", field=field)
