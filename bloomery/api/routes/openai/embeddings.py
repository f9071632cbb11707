"""`/v1/embeddings`: texts as vectors. A vector is the model's hidden state of the text's last token behind its final norm, scaled to length 1.

Every model here has such states, so each can be asked. How well they tell texts apart is up to the model: few were trained for it.
"""

import asyncio
import base64
from collections.abc import Container, Mapping
from typing import Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Request, Response

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.openai.closed import Closed
from bloomery.api.routes.openai.http import read_request, respond_whole, version_headers
from bloomery.api.routes.openai.prepared import consent_of, episode_of, is_tokens
from bloomery.api.routes.openai.requests import ModelName, User, parse
from bloomery.api.routes.openai.shapes import Refused, body_of
from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.data.span_rows import Inference
from bloomery.services.engines.models import Size
from bloomery.services.serving.embedding import Embedded, Floats, embedded
from bloomery.services.threads import off_loop
from bloomery.services.weights.target import Target
from bloomery.types.errors import InvalidInput, code_of
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Consent
from bloomery.types.traffic import SpanStatus

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


class PreparedEmbedding(NamedTuple):
    """One request, ready to be answered."""

    id: str
    created_us: int
    target: Target
    body: dict[str, Any]
    """As the caller sent it."""
    asked: EmbeddingRequest
    inputs: list[list[int]]
    """The tokens of each text."""
    consent: Consent
    episode: str | None

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.inputs))


@router.post("/embeddings", openapi_extra=body_of(EmbeddingRequest, refused={EmbeddingRequest: REFUSED}))
async def embeddings(request: Request, services: Svc, caller: Caller) -> Response:
    """Turn one or several texts into vectors."""
    created_us = now_us()
    body, (asked, given) = await read_request(request, _embedding)
    target = await services.sampling.resolve(caller, asked.model)
    consent, episode = consent_of(request.headers), episode_of(request.headers)
    inputs = await _tokens(services, target, given)
    services.limits.prompt(caller, sum(map(len, inputs)), field="input")
    prepared = PreparedEmbedding(new_id("embd"), created_us, target, body, asked, inputs, consent, episode)
    return await respond_whole(request, _answer(services, caller, prepared), version_headers(target))


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


async def _answer(services: Services, caller: Principal, prepared: PreparedEmbedding) -> dict[str, Any]:
    """Recorded however it ends; what came of no vector is not charged, unless nobody waited for it: what was begun then was work."""
    work = _Embedding(services, caller, prepared)
    status: SpanStatus = "cancelled"
    error_code, unpaid = None, 0
    try:
        vectors = await work.run()
        status = "ok"
    except asyncio.CancelledError:
        unpaid = _tokens_without(prepared, work.begun)
        raise
    except Exception as error:
        status, error_code = "error", code_of(error)
        unpaid = _tokens_without(prepared, work.found)
        raise
    finally:
        services.limits.give_back(caller, unpaid)
        services.traffic.record(_inference(caller, prepared, work.found, status, error_code, unpaid))
    encode = _base64 if prepared.asked.encoding_format == "base64" else _floats
    data = [{"object": "embedding", "index": index, "embedding": encode(each.vector_D)} for index, each in enumerate(vectors)]
    usage = {"prompt_tokens": prepared.tokens, "total_tokens": prepared.tokens}
    return {"id": prepared.id, "object": "list", "data": data, "model": prepared.target.display, "usage": usage}


def _tokens_without(prepared: PreparedEmbedding, places: Container[int]) -> int:
    """Those of the texts at all other places."""
    return sum(len(tokens) for place, tokens in enumerate(prepared.inputs) if place not in places)


class _Embedding:
    """The texts of a request on their way to vectors. How far they came it says also where it returns nothing, by an error or cancelled."""

    def __init__(self, services: Services, caller: Principal, prepared: PreparedEmbedding) -> None:
        self._sampling, self._caller, self._prepared = services.sampling, caller, prepared
        self._turns = asyncio.Semaphore(min(_AT_ONCE, services.meters.most_waiting(prepared.target.priority)))
        self.begun: set[int] = set()
        """Places of the texts whose turn has come."""
        self.found: dict[int, Embedded] = {}
        """What came of a text, by its place."""

    async def run(self) -> list[Embedded]:
        """What comes of all texts, in their order; the first error of any ends the request, whatever others are in the making."""
        tasks = [asyncio.create_task(self._embed(place, tokens)) for place, tokens in enumerate(self._prepared.inputs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await background.stop(*tasks)

    async def _embed(self, place: int, tokens: list[int]) -> Embedded:
        async with self._turns:
            self.begun.add(place)
            self.found[place] = await embedded(self._sampling, self._caller, self._prepared.target, tokens)
            return self.found[place]


def _inference(
    caller: Principal, prepared: PreparedEmbedding, found: Mapping[int, Embedded], status: SpanStatus, error_code: str | None, unpaid: int
) -> Inference:
    """One for all texts: a request may have more of them than the recorder has places."""
    return Inference(
        id=prepared.id,
        project=caller.project,
        kind="embedding",
        target=prepared.target,
        template_hash=None,
        request=prepared.body,
        choices=[],
        prompt_tokens=[],
        samples=[],
        seed=None,
        started_us=prepared.created_us,
        duration_us=now_us() - prepared.created_us,
        status=status,
        error_code=error_code,
        cached_tokens=sum(each.found_tokens for each in found.values()),
        unpaid_tokens=unpaid,
        embedded_tokens=prepared.tokens,
        consent=prepared.consent,
        episode_id=prepared.episode,
        tags={} if prepared.asked.user is None else {"user": prepared.asked.user},
    )


def _floats(vector_D: Floats) -> list[float]:
    numbers: list[float] = vector_D.tolist()
    return numbers


def _base64(vector_D: Floats) -> str:
    """Little-endian float32, as the contract wants it."""
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
