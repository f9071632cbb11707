"""`Engine`: everything that is asked of whatever samples, be it ours (`embedded.py`) or another project's behind its own API.

Requests stream. Weights have names: `MODEL` is the engine's own model, every other name an adapter's. A request names a version and keeps it to its
end, or a name (`Live`) and follows it. New weights are staged (`begin_update`, `apply`) while requests run, and swapped in (`commit`) between two
steps. Every method may raise `NotSupported` for what `capabilities` says that the engine cannot do, `Conflict` for what it cannot do now, and
`Unavailable` for what took too long, naming what it waited for.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from bloomery.types.generation import (
    Abort,
    Generate,
    Live,
    PromptEmbedded,
    PromptFound,
    PromptRouted,
    PromptScored,
    SampledToken,
    SampleFinished,
    Weights,
)
from bloomery.types.serving import Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo

EngineEvent = PromptFound | PromptScored | PromptRouted | PromptEmbedded | SampledToken | SampleFinished
"""What comes of a request. A token says its version where that is not the one of the token before (`types.serving.version_spans`)."""


class Patch(NamedTuple):
    """New values [n] of a tensor at `indices` [n], flat and in the shape under which it is published; all other values stay."""

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""


Update = Tensor | Patch
"""What becomes of a tensor: all its values, or some."""


class Engine(Protocol):
    """An engine that samples."""

    def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        """Serve a request; a bad one is an error of the first step. Closing the generator ends the request in the engine."""
        ...

    async def score(self, prompt: list[int], weights: Weights | Live, *, top_k: int = 0) -> PromptScored:
        """Log-probabilities of a prompt's tokens, and of the `top_k` likeliest at each position."""
        ...

    async def abort(self, abort: Abort) -> None:
        """End a request or one of its samples, with reason `abort`; one that is not there is no error."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Sample nothing until `resume`. Returns when no request runs any more; requests that come meanwhile wait."""
        ...

    async def resume(self) -> None:
        """Go on with what stood still and what came meanwhile."""
        ...

    async def begin_update(self, name: str, version: str) -> None:
        """Stage weights for a name, from a copy of those that it has; `version` is new, and what tokens will say."""
        ...

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        """Stage tensors or patches under their published names. What does not fit is refused whole, and the update goes on."""
        ...

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        """Swap in what was staged, between two steps; the next token of whoever follows the name is of these weights."""
        ...

    async def cancel_update(self, name: str) -> None:
        """Forget what was staged."""
        ...

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        """The same with weights that the engine's disk holds; they are read while requests run."""
        ...

    async def weight_info(self, name: str) -> WeightInfo:
        """What is served under a name."""
        ...

    async def load_adapter(self, name: str, weights: Weights) -> None:
        """Serve an adapter that the engine's disk holds under a new name."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Serve it no longer; requests that run with it are served to their end."""
        ...

    async def adapters(self) -> dict[str, str]:
        """Version of every adapter that has a name."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of requests that have left."""
        ...

    async def sleep(self) -> None:
        """Give back all memory that can be had again. Requests that come wait; while some run, it is a conflict."""
        ...

    async def wake(self) -> None:
        """Serve again."""
        ...

    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        ...

    async def metrics(self) -> EngineMetrics:
        """What it is doing."""
        ...
