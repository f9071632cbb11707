"""From a request to work: which weights, which tokens, how many, and what may be done with the record of it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np

from bloomery.api.routes.openai.formats import ResponseFormat, answer_format
from bloomery.api.routes.openai.requests import MAX_PIECES, MAX_PROMPTS, Asked, ChatRequest, CompletionRequest, Limit
from bloomery.api.routes.openai.tools import use_of
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.engines.models import Size
from bloomery.services.serving.sampling import draw_seed
from bloomery.services.serving.tool_use import ToolUse, checked_grammar
from bloomery.services.weights.target import Target
from bloomery.types.arrays import Array
from bloomery.types.checks import MAX_SAMPLES, MAX_SEED
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Generate, Grammar, LogprobsMode, SamplingParams
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Consent

DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_PROMPT_NUMBERS: Final = 1 << 20
"""Log-probabilities of prompts in one answer; each is some 60 bytes of JSON, and every choice repeats those of its prompt."""
_MAX_EPISODE: Final = 256

Kind = Literal["chat", "completion"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """One request, ready to be sampled; prompt `i` of several is sampled with seed `seed + i`, or equal prompts would be answered alike."""

    id: str
    kind: Kind
    created_us: int
    target: Target
    body: dict[str, Any]
    """As the caller sent it."""
    asked: Asked
    prompts: list[list[int]]
    samples: int
    """Continuations of each prompt."""
    shown: int | None = None
    """Of each prompt's continuations so many are answered, the likeliest first; None: all of them, in their order."""
    max_tokens: int
    seed: int
    top_logprobs: int | None
    """Log-probabilities to show: None for none, else how many alternatives to each token."""
    echo: bool
    template_hash: str | None
    end_tokens: tuple[int, ...]
    consent: Consent
    episode: str | None
    tools: ToolUse | None = None
    """What may be called."""
    grammar: Grammar | None = None
    """What every answer follows."""

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Whose log-probabilities the answer shows."""
        return self.asked.logprobs_mode or "raw_logprobs"

    def seed_of(self, prompt: int) -> int:
        """The seed of one of the prompts."""
        following = self.seed + prompt
        return following if following <= MAX_SEED else following - MAX_SEED - 1

    def generate(self, prompt: int) -> Generate:
        """The request to the engine for one of the prompts."""
        echoed = self.echo and self.top_logprobs is not None
        told = self.asked.prompt_logprobs
        return Generate(
            request_id=self.id,
            weights=self.target.weights,
            prompt=Array.of(np.asarray(self.prompts[prompt], dtype=np.int32)),
            params=self._params(prompt),
            num_samples=self.samples,
            prompt_logprobs=echoed or told is not None,
            prompt_ranks=told is not None,
            prompt_top_k=max((self.top_logprobs or 0) if echoed else 0, told or 0),
            top_logprobs=self.top_logprobs or 0,
            priority=self.target.priority,
            grammar=self.grammar,
        )

    def _params(self, prompt: int) -> SamplingParams:
        asked = self.asked
        return SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed_of(prompt),
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_k=max(0, asked.top_k or 0),
            top_p=1.0 if asked.top_p is None else asked.top_p,
            stop_tokens=self.end_tokens,
            min_p=asked.min_p or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
            min_tokens=asked.min_tokens or 0,
        )


def most_pieces(services: Services) -> int:
    """How many messages, parts and calls a conversation may have: each counts as one token, and no model here could read more."""
    return min(MAX_PIECES, services.models.longest_context or MAX_PIECES)


async def prepare_chat(
    services: Services, caller: Principal, body: dict[str, Any], asked: ChatRequest, headers: Mapping[str, str]
) -> PreparedRequest:
    """Render the conversation with the template of the target's base."""
    created_us = now_us()
    target = await services.sampling.resolve(caller, asked.model)
    tokenizer = services.models.tokenizer(target.base_hash)
    parallel = asked.parallel_tool_calls is not False
    tools = use_of(services.models, target.base_hash, asked.tools, asked.tool_choice, parallel=parallel)
    messages = [message.plain(index) for index, message in enumerate(asked.messages)]
    told = [] if tools is None else [tool.plain() for tool in asked.tools or ()]
    prompt = await services.rendering.prompt(target.base_hash, messages, told, asked.chat_template_kwargs)
    grammar = await _grammar(asked, asked.response_format, tools)
    size = services.models.size(target.base_hash)
    _check_prompt_numbers([prompt], 1, asked, echoed=None)
    return PreparedRequest(
        id=new_id("chatcmpl"),
        kind="chat",
        created_us=created_us,
        target=target,
        body=body,
        asked=asked,
        prompts=[prompt],
        samples=asked.n or 1,
        max_tokens=_budget([prompt], size, asked.limit, field="messages", otherwise=size.context),
        seed=draw_seed(asked.seed),
        top_logprobs=asked.top_logprobs or 0 if asked.logprobs else None,
        echo=False,
        template_hash=tokenizer.template_hash,
        end_tokens=_end_tokens(asked, tokenizer.end_tokens, size),
        consent=consent_of(headers, stored=bool(asked.store)),
        episode=episode_of(headers, asked.metadata),
        tools=tools,
        grammar=grammar,
    )


async def _grammar(asked: Asked, response_format: ResponseFormat | None, tools: ToolUse | None) -> Grammar | None:
    if response_format is None and asked.structured_outputs is None and tools is None:
        return None
    # A long grammar takes a while to read.
    wanted = await asyncio.to_thread(answer_format, response_format, asked.structured_outputs)
    if tools is not None and wanted is not None and (tools.forced or wanted.schema is None):
        instead = "`tool_choice` `auto` and a JSON schema go together, or leave out one of them"
        raise InvalidInput(f"`{wanted.field}` says what the answer is, and so do the `tools`: {instead}", field=wanted.field)
    if wanted is None:
        return await checked_grammar(None, "tools", tools, None)
    return await checked_grammar(wanted.grammar, wanted.field, tools, wanted.schema)


async def prepare_completion(
    services: Services, caller: Principal, body: dict[str, Any], asked: CompletionRequest, given: "Prompts", headers: Mapping[str, str]
) -> PreparedRequest:
    """Encode the prompts, where they are not tokens already."""
    created_us = now_us()
    target = await services.sampling.resolve(caller, asked.model)
    size = services.models.size(target.base_hash)
    prompts = given.tokens + await services.rendering.encode(target.base_hash, given.texts, ["prompt"] * len(given.texts))
    # First, because it looks at lengths alone: what is too long may be millions of tokens.
    max_tokens = _budget(prompts, size, asked.limit, field="prompt", otherwise=DEFAULT_COMPLETION_TOKENS)
    _check_tokens(prompts, size)
    shown, samples = asked.n or 1, asked.best_of or asked.n or 1
    field, wanted = "best_of" if samples > shown else "n", samples * len(prompts)
    if wanted > MAX_SAMPLES:
        raise InvalidInput(f"`{field}` times the number of prompts is at most {MAX_SAMPLES}, not {wanted}", field=field)
    # All prompts of a request wait together.
    services.meters.check_samples(wanted, target.priority, field=field if samples > 1 else "prompt")
    _check_prompt_numbers(prompts, shown, asked, echoed=asked.logprobs if asked.echo else None)
    return PreparedRequest(
        id=new_id("cmpl"),
        kind="completion",
        created_us=created_us,
        target=target,
        body=body,
        asked=asked,
        prompts=prompts,
        samples=samples,
        shown=shown if samples > shown else None,
        max_tokens=max_tokens,
        seed=draw_seed(asked.seed),
        top_logprobs=asked.logprobs,
        echo=bool(asked.echo),
        template_hash=None,
        end_tokens=_end_tokens(asked, services.models.tokenizer(target.base_hash).end_tokens, size),
        consent=consent_of(headers, stored=bool(asked.store)),
        episode=episode_of(headers, asked.metadata),
        grammar=await _grammar(asked, None, None),
    )


class Prompts(NamedTuple):
    """What is to be continued: texts, or else token ids."""

    texts: list[str]
    tokens: list[list[int]]


def prompts_of(prompt: str | list[Any]) -> Prompts:
    """One or several prompts of one kind."""
    several: list[Any] = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
    if len(several) > MAX_PROMPTS:
        raise InvalidInput(f"`prompt` holds at most {MAX_PROMPTS} prompts, not {len(several)}", field="prompt")
    if several and all(isinstance(item, str) for item in several):
        return Prompts(several, [])
    if several and all(map(is_tokens, several)):
        return Prompts([], several)
    raise InvalidInput("`prompt` is a text, a list of token ids, or a list of several of either, and not empty", field="prompt")


def is_tokens(value: Any) -> bool:
    """Whether this is a prompt as token ids, and not several prompts."""
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)


def _check_tokens(prompts: Sequence[list[int]], size: Size) -> None:
    for tokens in prompts:
        if not tokens:
            raise InvalidInput("`prompt` is empty: it needs at least one token", field="prompt")
        if min(tokens) < 0 or max(tokens) >= size.vocab_size:
            raise InvalidInput(f"`prompt` holds token ids outside the vocabulary of {size.vocab_size}", field="prompt")


def _budget(prompts: Sequence[list[int]], size: Size, limit: Limit, *, field: str, otherwise: int) -> int:
    """How many tokens may be sampled: what was asked for, or else what the contract gives, as far as there is room for it."""
    longest = max(map(len, prompts))
    room, least = size.context - longest, int(limit.tokens != 0)
    if room < least:
        problem = f"`{field}` has {longest} tokens and leaves no room in the model's context of {size.context}"
        raise InvalidInput(f"{problem}: shorten it to at most {size.context - least}", field=field)
    if limit.tokens is not None and limit.tokens > room:
        problem = f"the prompt has {longest} tokens and the model's context {size.context}"
        raise InvalidInput(f"{problem}: ask for at most {room} `{limit.field}`, not {limit.tokens}", field=limit.field)
    return min(room, otherwise) if limit.tokens is None else limit.tokens


def _check_prompt_numbers(prompts: Sequence[list[int]], shown: int, asked: Asked, *, echoed: int | None) -> None:
    tokens = sum(map(len, prompts)) * shown
    for field, top in (("prompt_logprobs", asked.prompt_logprobs), ("logprobs", echoed)):
        if top is not None and tokens * (top + 1) > MAX_PROMPT_NUMBERS:
            problem = f"`{field}` asks for {tokens * (top + 1)} log-probabilities of prompts, at most {MAX_PROMPT_NUMBERS} are given at a time"
            raise InvalidInput(f"{problem}: send fewer prompts, or lower `{field}` or `n`", field=field)


def _end_tokens(asked: Asked, ends: tuple[int, ...], size: Size) -> tuple[int, ...]:
    """What ends a continuation: the model's own end tokens, unless they are to be ignored, and those that the caller names."""
    named = asked.stop_token_ids or []
    if any(token >= size.vocab_size for token in named):
        raise InvalidInput(f"`stop_token_ids` holds ids outside the vocabulary of {size.vocab_size}", field="stop_token_ids")
    return tuple(dict.fromkeys([*(() if asked.ignore_eos else ends), *named]))


def consent_of(headers: Mapping[str, str], *, stored: bool = False) -> Consent:
    """The header decides; without it `store` allows evaluation and nothing more."""
    header = headers.get("x-bloomery-consent")
    if header is None:
        return "eval" if stored else "none"
    if header not in get_args(Consent):
        raise InvalidInput(f"the header x-bloomery-consent is none, eval or train, not `{header}`", field="x-bloomery-consent")
    return cast(Consent, header)


def episode_of(headers: Mapping[str, str], metadata: Mapping[str, str] | None = None) -> str | None:
    """What the request is a part of, by its header or its metadata."""
    episode = headers.get("x-bloomery-episode") or (metadata or {}).get("episode")
    if episode is not None and len(episode) > _MAX_EPISODE:
        raise InvalidInput(f"an episode's name has at most {_MAX_EPISODE} characters", field="x-bloomery-episode")
    return episode
