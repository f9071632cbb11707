"""Sampling sessions and samples."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from fastapi import APIRouter, Header
from msgspec.structs import replace

from bloomery.api.deps import Caller, Svc
from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.errors import TinkerRoute
from bloomery.api.routes.tinker.futures import Futures, Load, SampleFutures
from bloomery.api.routes.tinker.gather import Gathering
from bloomery.api.routes.tinker.meaning import hash_of_sample
from bloomery.api.routes.tinker.messages import PromptOut
from bloomery.api.routes.tinker.names import SampleFuture
from bloomery.api.routes.tinker.rollout import Rollout
from bloomery.api.routes.tinker.routed import KeptRouting, Routings
from bloomery.api.routes.tinker.targets import Targets
from bloomery.services.access.principal import Principal
from bloomery.services.clients.sessions import SamplingSession
from bloomery.services.core import Services
from bloomery.services.data.span_rows import DEFAULT_RETENTION_DAYS, Inference
from bloomery.services.serving.sampling import draw_seed
from bloomery.services.serving.stopping import StopStrings
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.generation import SCORED_TEMPERATURE_HEADER, Generate, LogprobsMode, SamplingParams
from bloomery.types.ids import now_us
from bloomery.types.resources import Consent

MAX_STOP_STRINGS: Final = 64
ROLLOUT_RETENTION_DAYS: Final = 7
_RECORDED_APART: Final[dict[str, Any]] = {
    "type": True,
    "sampling_session_id": True,
    "seq_id": True,
    "prompt": True,
    "sampling_params": {"seed"},
    "target_prompt_logprobs": True,
}
_SEED_BITS: Final = 64
_THEIRS: Final = {
    "prompt_top_k": "topk_prompt_logprobs",
    "top_logprobs": "topk_sample_logprobs",
    "prompt_draws": "prompt_alt_tokens_k",
    "targets": "target_prompt_logprobs",
    "routing": "x-bloomery-routing",
    "routing_weights": "x-bloomery-routing-weights",
    "scored_temperature": SCORED_TEMPERATURE_HEADER,
}
"""Fields that this contract calls otherwise."""

ConsentHeader = Annotated[Consent, Header(alias="x-bloomery-consent")]
RoutingHeader = Annotated[bool, Header(alias="x-bloomery-routing")]
RoutingWeightsHeader = Annotated[bool, Header(alias="x-bloomery-routing-weights")]
ScoredTemperatureHeader = Annotated[float, Header(alias=SCORED_TEMPERATURE_HEADER)]
EpisodeHeader = Annotated[str | None, Header(alias="x-bloomery-episode", max_length=256)]

router = APIRouter(route_class=TinkerRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(body: bodies.CreateSamplingSession, services: Svc, caller: Caller) -> dict[str, Any]:
    """Pin weights for a client's sampler."""
    caller.require("infer")
    if (body.model_path is None) == (body.base_model is None):
        raise InvalidInput("give `model_path` or `base_model`, and not both", field="model_path")
    await services.sessions.require_open(caller, body.session_id)
    name = body.model_path if body.base_model is None else services.models.resolve(body.base_model).alias
    version = await services.versions.find(caller, str(name))
    made = await services.sessions.create_sampling(caller, body.session_id, body.sampling_session_seq_id, version, body.model_path)
    return {"type": "create_sampling_session", "sampling_session_id": made.id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, services: Svc, caller: Caller) -> dict[str, Any]:
    """What a sampler samples from."""
    found = await services.sessions.get_sampling(caller, sampler_id)
    return {"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path}


@router.post("/asample")
async def asample(
    body: bodies.Sample,
    services: Svc,
    caller: Caller,
    futures: Futures,
    routings: Routings,
    consent: ConsentHeader = "none",
    episode: EpisodeHeader = None,
    routing: RoutingHeader = False,
    routing_weights: RoutingWeightsHeader = False,
    scored_temperature: ScoredTemperatureHeader = 1.0,
) -> dict[str, Any]:
    """Begin to sample; the same body under the same `seq_id` of the same sampler is the same sample."""
    beside = Beside(consent=consent, episode=episode, routing=routing, routing_weights=routing_weights, scored_temperature=scored_temperature)
    return await begin(body, beside, services, caller, futures, routings)


class Beside(NamedTuple):
    """What is asked of a sample that the SDK's body has no place for."""

    consent: Consent
    episode: str | None
    routing: bool = False
    routing_weights: bool = False
    scored_temperature: float = 1.0
    drafts: tuple[tuple[int, ...], ...] = ()


async def begin(
    body: bodies.Sample, beside: Beside, services: Services, caller: Principal, futures: SampleFutures, routings: KeptRouting
) -> dict[str, Any]:
    """A future of a sample."""
    session = await services.sessions.get_sampling(caller, body.sampling_session_id)
    tokens = _prompt(body.prompt)
    targets = None if body.target_prompt_logprobs is None else Targets.of(body.target_prompt_logprobs, len(tokens))
    generate = _generate(body, tokens, targets, services, session)
    generate = replace(
        generate,
        routing=beside.routing,
        routing_weights=beside.routing_weights,
        scored_temperature=beside.scored_temperature,
        drafts=beside.drafts,
    )
    watch = _stop_watch(body, services, session)
    with in_words_of(_THEIRS):
        stream = services.sampling.stream(caller, session.target, generate)
    # Only now is it judged how many samples there may be.
    gathering = Gathering(generate.num_samples, watch, _logprobs_mode(generate))
    known = _known(body, services, session, generate, project=caller.project, consent=beside.consent, episode=beside.episode)
    prompt = PromptOut(logprobs=body.prompt_logprobs, cells=None if targets is None else targets.cells)
    future = SampleFuture(session.id, body.seq_id)
    drafted = sum(map(len, beside.drafts)) if beside.drafts else None
    # Drafts are read as the prompt is, so they are paid for and bounded with it.
    read = len(tokens) + (drafted or 0)
    load = Load(generate.num_samples, read)
    make = Rollout(services, caller, stream, gathering, known, prompt, drafted=drafted).answer
    admit = partial(services.limits.rollout, caller, read, field="drafts" if drafted else "prompt")
    kept = routings.keeping(future, caller.project, gathering, make) if beside.routing else make
    futures.start(future, caller.project, load, kept, admit, asked=hash_of_sample(body, generate.prompt.data, beside))
    return future.accepted(generate.num_samples)


@router.post("/join_sampling_session")
async def join_sampling_session(body: bodies.JoinSampler, services: Svc, caller: Caller) -> dict[str, Any]:
    """A number of its own for a copy of a sampler, from which it counts its samples."""
    return {"type": "join_sampling_session", "client_counter": await services.sessions.join_sampling(caller, body.sampling_session_id)}


def _known(
    body: bodies.Sample, services: Services, session: SamplingSession, generate: Generate, *, project: str, consent: Consent, episode: str | None
) -> Inference:
    """What is recorded of a sample before it is made. Its id is that of its sequences without their own number."""
    return Inference(
        id=f"{session.id}:{body.seq_id}",
        project=project,
        kind="sample",
        target=session.target,
        template_hash=None,
        request=body.model_dump(exclude=_RECORDED_APART),
        choices=[],
        prompt_tokens=generate.prompt.numpy().tolist(),
        samples=[],
        seed=generate.params.seed,
        started_us=now_us(),
        duration_us=0,
        consent=consent,
        episode_id=episode,
        session_id=session.session_id,
        retention_days=ROLLOUT_RETENTION_DAYS if consent == "none" else DEFAULT_RETENTION_DAYS,
        # Training samples thousands of times what is served: nobody keeps the content of it who does not ask for it.
        keeps_body=consent != "none",
        spell=services.models.tokenizer(session.base_hash).decode,
    )


def _generate(body: bodies.Sample, tokens: list[int], targets: Targets | None, services: Services, session: SamplingSession) -> Generate:
    """The request to the engine. What it holds is judged by the sampling service."""
    _check_last_n(body, len(tokens))
    room = services.models.size(session.base_hash).context - len(tokens)
    asked, last_n = body.sampling_params, body.prompt_logprobs_last_n
    generate = Generate(
        request_id="",
        weights=session.weights,
        prompt=Array.of(np.asarray(tokens, dtype=np.int32)),
        params=SamplingParams(
            max_tokens=max(room, 0) if asked.max_tokens is None else asked.max_tokens,
            seed=_seed(asked.seed),
            temperature=asked.temperature,
            top_k=0 if asked.top_k == -1 else asked.top_k,
            top_p=asked.top_p,
            stop_tokens=_stop_tokens(asked.stop, services, session),
        ),
        num_samples=body.num_samples,
        prompt_logprobs=body.prompt_logprobs,
        prompt_top_k=body.topk_prompt_logprobs,
        scored_from=1 if last_n is None else len(tokens) - last_n,
        targets=None if targets is None else targets.asked,
        prompt_draws=body.prompt_alt_tokens_k,
        top_logprobs=body.topk_sample_logprobs,
    )
    if generate.scores_prompt and room == 0:
        # A prompt that is only to be scored may fill the context; the SDK asks for one token even then.
        return replace(generate, params=replace(generate.params, max_tokens=0))
    return generate


def _seed(seed: int | None) -> int:
    """Any number of 64 bits, with or without a sign; the noise depends on its bits, and it is recorded with a sign."""
    if seed is None:
        return draw_seed(None)
    if not -(1 << (_SEED_BITS - 1)) <= seed < 1 << _SEED_BITS:
        raise InvalidInput(f"`seed` is {seed}: it must be a number of {_SEED_BITS} bits", field="sampling_params.seed")
    return seed if seed < 1 << (_SEED_BITS - 1) else seed - (1 << _SEED_BITS)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name fields as a contract calls them: `names` has its own for those that it calls otherwise."""
    try:
        yield
    except InvalidInput as error:
        theirs = names.get(error.field or "")
        if theirs is None:
            raise
        raise InvalidInput(error.message.replace(f"`{error.field}`", f"`{theirs}`"), field=theirs) from error


def _stop_watch(body: bodies.Sample, services: Services, session: SamplingSession) -> Callable[[], StopStrings] | None:
    """What watches each sample for stop strings, if any were given."""
    stop = body.sampling_params.stop
    strings = [stop] if isinstance(stop, str) else [item for item in stop or [] if isinstance(item, str)]
    if "" in strings or len(strings) > MAX_STOP_STRINGS:
        raise InvalidInput(f"`stop` holds at most {MAX_STOP_STRINGS} strings, none of them empty", field="sampling_params.stop")
    return partial(StopStrings, services.models.tokenizer(session.base_hash), strings) if strings else None


def _stop_tokens(stop: str | list[str] | list[int] | None, services: Services, session: SamplingSession) -> tuple[int, ...]:
    if stop is None:
        return tuple(services.models.tokenizer(session.base_hash).end_tokens)
    # A list replaces the model's end tokens: [] means that nothing but the length ends a sample.
    tokens, size = tuple(item for item in stop if isinstance(item, int)), services.models.size(session.base_hash)
    if any(not 0 <= token < size.vocab_size for token in tokens):
        field = "sampling_params.stop"
        raise InvalidInput(f"`{field}` holds ids outside the vocabulary of {size.vocab_size}: nothing would ever stop there", field=field)
    return tokens


def _prompt(prompt: bodies.ModelInput) -> list[int]:
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise NotSupported(f"the prompt has a chunk of type `{chunk.type}`; only encoded_text is offered yet", field="prompt.chunks")
    return [token for chunk in prompt.chunks for token in chunk.tokens]


def _check_last_n(body: bodies.Sample, length: int) -> None:
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < length):
        field = "prompt_logprobs_last_n"
        raise InvalidInput(f"`{field}` needs `prompt_logprobs` and is between 1 and {length - 1}, one less than the prompt", field=field)


def _logprobs_mode(generate: Generate) -> LogprobsMode:
    """Those of the distribution that was drawn from, as ratios with the losses' log-probabilities need them; nothing is drawn at temperature 0."""
    return "raw_logprobs" if generate.params.temperature == 0 else "processed_logprobs"
