"""`/v1/embeddings`: texts as vectors. A vector is the model's hidden state of the text's last token behind its final norm, scaled to length 1.

Every model here has such states, so each can be asked. How well they tell texts apart is up to the model: few were trained for it.
"""

import asyncio
import base64
from typing import Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.http import read_request, respond_whole, version_headers
from bloomery.api.routes.openai.jobs import is_tokens
from bloomery.api.routes.openai.requests import ModelName, Refused, User, parse
from bloomery.api.routes.openai.shapes import body_of
from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.engines.models import Size
from bloomery.services.serving.embedding import Floats, embedded
from bloomery.services.threads import off_loop
from bloomery.services.weights.target import Target
from bloomery.types.errors import InvalidInput

MAX_INPUTS: Final = 2048
MAX_NUMBERS: Final = 1 << 21
"""Of all vectors of an answer: as text they take about forty megabytes, and nothing else is answered while they are written."""
_AT_ONCE: Final = 32
"""Texts of a request that are in the engine together: others want their turn too."""
_TOKEN_BYTES: Final = 8
"""Of a token's place in a list."""
REFUSED: Final[Refused] = {"dimensions": ()}

router = APIRouter()


class EmbeddingRequest(Closed, frozen=True, kw_only=True):
    """Body of `/v1/embeddings`; an input is a text, token ids, or a list of either."""

    model: ModelName
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    user: User | None = None


class Inputs(NamedTuple):
    """What is to be embedded: texts, or else token ids; and the field of each."""

    texts: list[str]
    tokens: list[list[int]]
    fields: list[str]


@router.post("/embeddings", openapi_extra=body_of(EmbeddingRequest))
async def embeddings(request: Request, services: Svc, caller: Caller) -> Response:
    """Turn one or several texts into vectors."""
    _, (asked, given) = await read_request(request, _embedding)
    target = await services.sampling.resolve(caller, asked.model)
    inputs = await _tokens(services, target, given)
    services.limits.prompt(caller, sum(map(len, inputs)), field="input")
    return await respond_whole(request, _answer(services, caller, target, asked, inputs), version_headers(target))


def _embedding(body: dict[str, Any]) -> tuple[EmbeddingRequest, Inputs]:
    asked = parse(body, kind=EmbeddingRequest, refused=REFUSED)
    several: list[Any] = [asked.input] if isinstance(asked.input, str) or is_tokens(asked.input) else asked.input
    if not 0 < len(several) <= MAX_INPUTS:
        raise InvalidInput(f"`input` holds 1 to {MAX_INPUTS} texts, not {len(several)}", field="input")
    fields = ["input"] if several is not asked.input else [f"input.{index}" for index in range(len(several))]
    if all(isinstance(text, str) for text in several):
        return asked, Inputs(several, [], fields)
    if all(map(is_tokens, several)):
        return asked, Inputs([], several, fields)
    raise InvalidInput("`input` is a text, a list of token ids, or a list of several of either", field="input")


async def _tokens(services: Services, target: Target, given: Inputs) -> list[list[int]]:
    size = services.models.size(target.base_hash)
    if len(given.fields) * size.width > MAX_NUMBERS:
        most = MAX_NUMBERS // size.width
        raise InvalidInput(f"`input` holds {len(given.fields)} texts: vectors of {size.width} numbers come for {most} at most", field="input")
    inputs = given.tokens + await services.rendering.encode(target.base_hash, given.texts, given.fields[: len(given.texts)])
    await off_loop(_TOKEN_BYTES * sum(map(len, inputs)), _check_tokens, inputs, given.fields, size)
    return inputs


def _check_tokens(inputs: list[list[int]], fields: list[str], size: Size) -> None:
    for field, tokens in zip(fields, inputs, strict=True):
        if not 0 < len(tokens) < size.context:
            raise InvalidInput(f"`{field}` has {len(tokens)} tokens: the model takes 1 to {size.context - 1}", field=field)
        if min(tokens) < 0 or max(tokens) >= size.vocab_size:
            raise InvalidInput(f"`{field}` holds token ids outside the vocabulary of {size.vocab_size}", field=field)


async def _answer(services: Services, caller: Principal, target: Target, asked: EmbeddingRequest, inputs: list[list[int]]) -> dict[str, Any]:
    vectors = await _vectors(services, caller, target, inputs)
    encode = _base64 if asked.encoding_format == "base64" else _floats
    data = [{"object": "embedding", "index": index, "embedding": encode(vector_D)} for index, vector_D in enumerate(vectors)]
    tokens = sum(map(len, inputs))
    return {"object": "list", "data": data, "model": target.display, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


async def _vectors(services: Services, caller: Principal, target: Target, inputs: list[list[int]]) -> list[Floats]:
    places = asyncio.Semaphore(min(_AT_ONCE, services.meters.most_waiting(target.priority)))

    async def vector(tokens: list[int]) -> Floats:
        async with places:
            return await embedded(services.sampling, caller, target, tokens)

    tasks = [asyncio.create_task(vector(tokens)) for tokens in inputs]
    try:
        # The first error of any ends the request, whatever others are in the making.
        return await asyncio.gather(*tasks)
    except Exception:
        # Who hung up is no such case: what was begun for him was work.
        services.limits.give_back(caller, sum(len(tokens) for task, tokens in zip(tasks, inputs, strict=True) if not _succeeded(task)))
        raise
    finally:
        await background.stop(*tasks)


def _succeeded(task: asyncio.Task[Floats]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _floats(vector_D: Floats) -> list[float]:
    numbers: list[float] = vector_D.tolist()
    return numbers


def _base64(vector_D: Floats) -> str:
    """Little-endian float32, as the contract wants it."""
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
