"""Answers to questions: by the models of this server, by those of endpoints, or as the rows give them.

`Answers` is the seam, `Askable` knows who answers. A model of this server is asked as somebody who evaluates: its samples leave the engine to
production, and are on nobody's account. What cannot be asked, and what nobody answers, is a failure of that question and ends nothing.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from bloomery.grade.declared import SamplingParams as AskedParams
from bloomery.grade.models import Question as AskedQuestion
from bloomery.render.rows import plain_message, plain_tools
from bloomery.services.access.principal import Principal
from bloomery.services.evaluations.evaluation_rows import Asked
from bloomery.services.evaluations.questions import Question, given_output
from bloomery.services.grading.endpoints import Endpoints, Outside
from bloomery.services.grading.own_models import Served
from bloomery.services.serving.tool_use import Function, ToolUse, checked_grammar, tool_use, whole_message
from bloomery.services.weights.target import Target
from bloomery.types.arrays import Array
from bloomery.types.checks import MAX_SEED
from bloomery.types.errors import BloomeryError, Deadly, InvalidInput, NotSupported, RateLimited, Unavailable, reason
from bloomery.types.evaluations import Answered, AnswerError, AnswerFailure, AnswerParams
from bloomery.types.generation import FinishReason, Generate, SampledToken, SampleFinished, SamplingParams
from bloomery.types.ids import new_id

ATTEMPTS: Final = 3
ANSWER_S: Final = 600.0
"""For one question, with all attempts at it."""
FIRST_PAUSE_S: Final = 0.5
MAX_JSON_SEED: Final = 1 << 53
_FIELD: Final = "messages"
_SENT: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
"""What endpoints know of a message."""

Pause = Callable[[float], Awaitable[None]]


class Answers(Protocol):
    """Who answers. Unavailable and RateLimited say that asking again may help."""

    async def ask(self, question: Question, params: AnswerParams, seed: int) -> Answered:
        """One answer."""
        ...


async def answered(
    model: Answers, question: Question, params: AnswerParams, seed: int, *, answer_s: float = ANSWER_S, pause: Pause = asyncio.sleep
) -> Answered:
    """An answer, or why there is none; asked for again where somebody was away."""
    if question.problem is not None:
        return _failed("template", question.problem)
    try:
        async with asyncio.timeout(answer_s):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await model.ask(question, params, seed)
                except Deadly:
                    raise
                except (Unavailable, RateLimited) as error:
                    if attempt == ATTEMPTS:
                        raise
                    await pause(error.retry_after_s if isinstance(error, RateLimited) else FIRST_PAUSE_S * 4 ** (attempt - 1))
    except TimeoutError:
        return _failed("timeout", f"no answer within {answer_s:g} s")
    except BloomeryError as error:
        away = error.category == "server" or isinstance(error, RateLimited)
        return _failed("unavailable" if away else "refused", reason(error))
    raise AssertionError


def seed_of(params: AnswerParams, row: int, sample: int) -> int:
    """One for each answer to a row, whoever is asked."""
    return (params.seed + row * params.samples + sample) % (MAX_SEED + 1)


class Given:
    """The answers that rows have."""

    async def ask(self, question: Question, params: AnswerParams, seed: int) -> Answered:
        """That of the row; graders that look at no answer need none."""
        text, tools = given_output(question.given or {})
        return Answered(text=text, tools=tools)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A model of an endpoint."""

    model: Outside

    async def ask(self, question: Question, params: AnswerParams, seed: int) -> Answered:
        """One answer."""
        if question.prompt is not None or question.tools:
            what = "is a text to be continued" if question.prompt is not None else "may call tools"
            raise NotSupported(f"the question {what}, and models of endpoints are asked in conversations without tools", field=_FIELD)
        sampled = AskedParams(seed=seed % MAX_JSON_SEED, temperature=params.temperature, top_p=params.top_p, max_completions_tokens=params.max_tokens)
        messages = [{name: message[name] for name in _SENT if name in message} for message in question.messages]
        said = await self.model.ask(AskedQuestion(model="", messages=messages, schema=None, params=sampled))
        return Answered(
            text=said.text or said.refusal or "",
            finish_reason="stop" if said.whole else "length",
            latency_s=said.seconds or 0.0,
            prompt_tokens=said.usage.prompt_tokens,
            completion_tokens=said.usage.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class Askable:
    """Whoever may be asked."""

    served: Served
    endpoints: Endpoints

    def model(self, caller: Principal, asked: Asked, name: str) -> Answers:
        """Who answers as one of the models of an evaluation; Unavailable where its base is not served now."""
        if asked.source == "given":
            return Given()
        if asked.target is None:
            return Elsewhere(self.endpoints.named(caller, name))
        if not self.served.sampling.serves(asked.target):
            problem = f"the base model {asked.target.base_hash} of `{name}` is not served"
            raise Unavailable(f"{problem}: start the server with `--model DIR` of that base")
        return OwnModel(self.served, caller, asked.target)


@dataclass(frozen=True, slots=True)
class OwnModel:
    """Weights that this server serves."""

    served: Served
    p: Principal
    target: Target

    async def ask(self, question: Question, params: AnswerParams, seed: int) -> Answered:
        """One answer."""
        began_s = time.monotonic()
        use = self._use(question)
        generate = await self._generate(question, params, seed, use)
        tokens: list[int] = []
        ended: FinishReason | None = None
        async with aclosing(self.served.sampling.stream(self.p, self.target, generate)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    tokens.append(event.token)
                elif isinstance(event, SampleFinished):
                    ended = event.reason
        if ended in (None, "abort"):
            raise Unavailable("the engine gave this request up")
        tokenizer, ends = self.served.models.tokenizer(self.target.base_hash), generate.params.stop_tokens
        text, calls, told = tokenizer.decode([token for token in tokens if token not in ends]), [], str(ended)
        if use is not None:
            message, told_reason = whole_message(use, generate.request_id, text, ended)
            text, calls, told = message["content"] or "", message.get("tool_calls", []), told_reason or told
        return Answered(
            text=text,
            tools=calls,
            finish_reason=told,
            version=self.target.weights.version,
            latency_s=time.monotonic() - began_s,
            prompt_tokens=generate.prompt.shape[0],
            completion_tokens=len(tokens),
        )

    def _use(self, question: Question) -> ToolUse | None:
        if not question.tools:
            return None
        functions = [Function(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in question.tools]
        return tool_use(self.served.models.tokenizer(self.target.base_hash), functions, named=None, forced=False, parallel=True)

    async def _generate(self, question: Question, params: AnswerParams, seed: int, use: ToolUse | None) -> Generate:
        served, base_hash = self.served, self.target.base_hash
        if question.prompt is not None:
            (prompt,) = await served.rendering.encode(base_hash, [question.prompt], ["prompt"])
        else:
            messages = [plain_message(message) for message in question.messages]
            prompt = await served.rendering.prompt(base_hash, messages, plain_tools(question.tools) or ())
        size = served.models.size(base_hash)
        if not prompt or (room := size.context - len(prompt)) < 1:
            raise InvalidInput(f"the question has {len(prompt)} tokens, and the model takes 1 to {size.context - 1}", field=_FIELD)
        return Generate(
            request_id=new_id("evaluated"),
            weights=self.target.weights,
            prompt=Array.of(np.asarray(prompt, np.int32)),
            params=SamplingParams(
                max_tokens=min(room, params.max_tokens),
                seed=seed,
                temperature=params.temperature,
                top_p=params.top_p,
                stop_tokens=served.models.tokenizer(base_hash).end_tokens,
            ),
            priority="evaluation",
            grammar=await checked_grammar(None, "tools", use, None),
        )


def _failed(kind: AnswerFailure, detail: str) -> Answered:
    return Answered(error=AnswerError(kind=kind, detail=detail))
