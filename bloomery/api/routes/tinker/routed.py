"""The routing of samples: which experts of a mixture their tokens went to, and what the answers of these were multiplied with.

An answer of this contract has no place for it, and the SDK would drop what it does not know. So headers ask for it when a sample is begun, and it
is fetched afterwards by the id of the sequence, in the form that the inputs `routing` and `routing_weights` of a datum have. Like finished samples it
lies in memory, the oldest of it goes first, and sampling again with the same seed gives the same.
Shapes: P tokens of a prompt, n of a sample, L sparse layers, T experts per token.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request, Response
from numpy.typing import NDArray

from bloomery.api.deps import Caller
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.futures import Make, SampleAnswer
from bloomery.api.routes.tinker.gather import Gathering
from bloomery.api.routes.tinker.names import SampleFuture, parse_sequence
from bloomery.types.arrays import Array
from bloomery.types.errors import Gone, NotFound

MAX_KEPT: Final = 8192
MAX_KEPT_BYTES: Final = 256 << 20
FREE: Final = -1
"""Stands for the experts of a token that was never fed: its router is left free. Their weights are 0."""

Experts = NDArray[np.int16]
Weights = NDArray[np.float32]
Number = TypeVar("Number", np.int16, np.float32)


class Rows(NamedTuple, Generic[Number]):
    """Of one request: the prompt's tokens but the last [P - 1, L, T], and what each of its samples was fed [n, L, T], from the prompt's last on."""

    prompt: NDArray[Number]
    fed: tuple[NDArray[Number], ...]

    @classmethod
    def of(cls, kind: type[Number], prompt: Array, fed: Sequence[Sequence[Array]]) -> "Rows[Number]":
        """As the engine told it, token by token."""
        empty = np.empty((0, *prompt.shape[1:]), kind)
        samples = (np.stack([token.numpy() for token in tokens]).astype(kind) if tokens else empty for tokens in fed)
        return cls(prompt.numpy().astype(kind), tuple(samples))

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.prompt.nbytes + sum(part.nbytes for part in self.fed)

    def of_sequence(self, index: int, last: int) -> NDArray[Number]:
        """Of all tokens of the prompt and of one sample [P + n, L, T]; nobody was fed the last of them, for which `last` stands."""
        return np.concatenate([self.prompt, self.fed[index], np.full((1, *self.prompt.shape[1:]), last, self.prompt.dtype)])


class SampleRouting(NamedTuple):
    """Of one request."""

    experts: Rows[np.int16]
    weights: Rows[np.float32] | None
    """None where they were not asked for."""

    @classmethod
    def of(cls, gathering: Gathering) -> "SampleRouting | None":
        """What the engine told of it; None where it was not asked."""
        experts, weights = gathering.prompt_experts, gathering.prompt_expert_weights
        if experts is None:
            return None
        told = None if weights is None else Rows.of(np.float32, weights, gathering.fed_expert_weights())
        return cls(Rows.of(np.int16, experts, gathering.fed_experts()), told)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.experts.nbytes + (0 if self.weights is None else self.weights.nbytes)


class _Entry(NamedTuple):
    owner: str
    routing: SampleRouting


class KeptRouting:
    """That of the latest samples for which it was asked."""

    def __init__(self, *, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept, self._max_kept_bytes = max_kept, max_kept_bytes
        self._entries: dict[SampleFuture, _Entry] = {}
        """The oldest first."""
        self._kept_bytes = 0

    def keeping(self, future: SampleFuture, owner: str, gathering: Gathering, make: Make) -> Make:
        """Make the sample, and keep its routing before anyone has the answer."""

        async def made() -> SampleAnswer:
            answer = await make()
            if (routing := SampleRouting.of(gathering)) is not None:
                self.keep(future, owner, routing)
            return answer

        return made

    def keep(self, future: SampleFuture, owner: str, routing: SampleRouting) -> None:
        """Keep it, at the cost of the oldest; the newest is kept whatever its size."""
        self._drop(future)
        self._entries[future] = _Entry(owner, routing)
        self._kept_bytes += routing.nbytes
        while len(self._entries) > self._max_kept or (self._kept_bytes > self._max_kept_bytes and len(self._entries) > 1):
            self._drop(next(iter(self._entries)))

    def experts(self, sequence_id: str, owner: str) -> Experts:
        """Of one sequence [P + n, L, T]."""
        routing, index = self._find(sequence_id, owner)
        return routing.experts.of_sequence(index, FREE)

    def weights(self, sequence_id: str, owner: str) -> Weights:
        """What the answers of these experts were multiplied with [P + n, L, T]."""
        routing, index = self._find(sequence_id, owner)
        if routing.weights is None:
            how = "send `x-bloomery-routing-weights: true` with the sample"
            raise Gone(f"of the routing of sample `{sequence_id}` the experts alone were asked for; {how}")
        return routing.weights.of_sequence(index, 0)

    def _find(self, sequence_id: str, owner: str) -> tuple[SampleRouting, int]:
        future, index = parse_sequence(sequence_id)
        entry = self._entries.get(future)
        if entry is None or entry.owner != owner:
            how = "send `x-bloomery-routing: true` with the sample, and fetch it soon after"
            raise Gone(f"the routing of sample `{sequence_id}` is not in memory; {how}")
        if index >= len(entry.routing.experts.fed):
            raise NotFound(f"no sample `{sequence_id}`")
        return entry.routing, index

    def _drop(self, future: SampleFuture) -> None:
        if (entry := self._entries.pop(future, None)) is not None:
            self._kept_bytes -= entry.routing.nbytes


async def kept_routing(request: Request) -> KeptRouting:
    """That of this app."""
    found: KeptRouting = request.app.state.kept_routing
    return found


Routings = Annotated[KeptRouting, Depends(kept_routing)]
router = APIRouter(route_class=TinkerRoute)


@router.get("/samples/{sequence_id}/routing")
async def get_routing(sequence_id: str, caller: Caller, routings: Routings) -> Response:
    """Which experts each token of a prompt and of its sample went to, as the fields of the SDK's `TensorData`."""
    caller.require("infer")
    experts = routings.experts(sequence_id, caller.project)
    return Response(await asyncio.to_thread(_tensor, experts, "int64"), media_type="application/json")


@router.get("/samples/{sequence_id}/routing/weights")
async def get_routing_weights(sequence_id: str, caller: Caller, routings: Routings) -> Response:
    """What the answers of these experts were multiplied with, as the fields of the SDK's `TensorData`."""
    caller.require("infer")
    weights = routings.weights(sequence_id, caller.project)
    return Response(await asyncio.to_thread(_tensor, weights, "float32"), media_type="application/json")


def _tensor(values: Experts | Weights, dtype: str) -> bytes:
    fields: dict[str, Any] = {"data": values.ravel().tolist(), "dtype": dtype, "shape": values.shape}
    return msgspec.json.encode(fields)
