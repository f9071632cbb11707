"""A text as a vector: of what a model made of its last token, of length 1."""

from contextlib import aclosing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bloomery.services.access.principal import Principal
from bloomery.services.serving.sampling import Sampling
from bloomery.services.weights.target import Target
from bloomery.types.arrays import Array
from bloomery.types.errors import WorkerError
from bloomery.types.generation import Generate, PromptEmbedded, SamplingParams
from bloomery.types.ids import new_id

Floats = NDArray[np.float32]


class Embedded(NamedTuple):
    """A vector, and how many of its tokens another request had computed before."""

    vector_D: Floats
    found_tokens: int


async def embedded(sampling: Sampling, p: Principal, target: Target, tokens: list[int]) -> Embedded:
    """The vector of these tokens."""
    generate = Generate(
        request_id=new_id("embed"),
        weights=target.weights,
        prompt=Array.of(np.asarray(tokens, np.int32)),
        params=SamplingParams(max_tokens=1, seed=0),
        priority=target.priority,
        embed=True,
    )
    found = None
    async with aclosing(stream := sampling.stream(p, target, generate, bounded=True)) as events:
        async for event in events:
            if isinstance(event, PromptEmbedded):
                found = event.vector.numpy()
    if found is None:
        raise WorkerError(f"the engine of `{target.display}` gave no vector")
    return Embedded((found / np.linalg.norm(found)).astype(np.float32), stream.found_tokens)
