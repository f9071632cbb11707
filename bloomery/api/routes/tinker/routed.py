"""The routing of samples: which experts of a mixture their tokens went to.

An answer of this contract has no place for it, and the SDK would drop what it does not know. So a header asks for it when a sample is begun, and it
is fetched afterwards by the id of the sequence, in the form that the input `routing` of a datum has. Like finished samples it lies in memory, the
oldest of it goes first, and sampling again with the same seed gives the same.
Shapes: P tokens of a prompt, n of a sample, L sparse layers, T experts per token.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

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
"""Stands for the experts of a token that was never fed: its router is left free."""

Experts = NDArray[np.int16]


class SampleRouting(NamedTuple):
    """Of one request: the prompt's tokens but the last [P - 1, L, T], and what each of its samples was fed [n, L, T], from the prompt's last on."""

    prompt: Experts
    fed: tuple[Experts, ...]

    @classmethod
    def of(cls, prompt: Array, fed: Sequence[Sequence[Array]]) -> "SampleRouting":
        """As the engine told it, token by token."""
        empty = np.empty((0, *prompt.shape[1:]), np.int16)
        samples = (np.stack([token.numpy() for token in tokens]).astype(np.int16) if tokens else empty for tokens in fed)
        return cls(prompt.numpy().astype(np.int16), tuple(samples))

    @property
    def nbytes(self) -> int:
        """Memory."""
        return sum(part.nbytes for part in (self.prompt, *self.fed))

    def of_sequence(self, index: int) -> Experts:
        """Of all tokens of the prompt and of one sample [P + n, L, T]; nobody was fed the last of them."""
        last = np.full((1, *self.prompt.shape[1:]), FREE, np.int16)
        return np.concatenate([self.prompt, self.fed[index], last])


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
            if gathering.prompt_experts is not None:
                self.keep(future, owner, SampleRouting.of(gathering.prompt_experts, gathering.fed_experts()))
            return answer

        return made

    def keep(self, future: SampleFuture, owner: str, routing: SampleRouting) -> None:
        """Keep it, at the cost of the oldest; the newest is kept whatever its size."""
        self._drop(future)
        self._entries[future] = _Entry(owner, routing)
        self._kept_bytes += routing.nbytes
        while len(self._entries) > self._max_kept or (self._kept_bytes > self._max_kept_bytes and len(self._entries) > 1):
            self._drop(next(iter(self._entries)))

    def find(self, sequence_id: str, owner: str) -> Experts:
        """Of one sequence [P + n, L, T]."""
        future, index = parse_sequence(sequence_id)
        entry = self._entries.get(future)
        if entry is None or entry.owner != owner:
            how = "send `x-bloomery-routing: true` with the sample, and fetch it soon after"
            raise Gone(f"the routing of sample `{sequence_id}` is not in memory; {how}")
        if index >= len(entry.routing.fed):
            raise NotFound(f"no sample `{sequence_id}`")
        return entry.routing.of_sequence(index)

    def _drop(self, future: SampleFuture) -> None:
        if (entry := self._entries.pop(future, None)) is not None:
            self._kept_bytes -= entry.routing.nbytes


def kept_routing(request: Request) -> KeptRouting:
    """That of this app."""
    state = request.app.state
    if not hasattr(state, "kept_routing"):
        state.kept_routing = KeptRouting()
    found: KeptRouting = state.kept_routing
    return found


Routings = Annotated[KeptRouting, Depends(kept_routing)]
router = APIRouter(route_class=TinkerRoute)


@router.get("/samples/{sequence_id}/routing")
async def get_routing(sequence_id: str, caller: Caller, routings: Routings) -> Response:
    """Which experts each token of a prompt and of its sample went to, as the fields of the SDK's `TensorData`."""
    caller.require("infer")
    experts = routings.find(sequence_id, caller.project)
    return Response(await asyncio.to_thread(_tensor, experts), media_type="application/json")


def _tensor(experts: Experts) -> bytes:
    fields: dict[str, Any] = {"data": experts.ravel().tolist(), "dtype": "int64", "shape": experts.shape}
    return msgspec.json.encode(fields)
