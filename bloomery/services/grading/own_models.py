"""The models of this server as judges, on the account of who asks: his scopes, his limits, his deployments.

A question is sampled as a chat completion with a schema would be. Nothing of it is recorded as traffic: what a judge says of an output is in the
result. `reasoning_effort` is advice to models that are told it, and none here is.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bloomery.grade.models import Answer, Question, Vectors
from bloomery.services.access.limits import RateLimits
from bloomery.services.access.principal import Principal
from bloomery.services.engines.models import Models
from bloomery.services.serving.embedding import embedded
from bloomery.services.serving.rendering import Rendering
from bloomery.services.serving.sampling import Sampling, draw_seed
from bloomery.services.serving.tool_use import checked_grammar
from bloomery.services.weights.target import Target
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported, Unavailable
from bloomery.types.generation import Generate, Grammar, SampledToken, SampleFinished, SamplingParams
from bloomery.types.grading import GradeUsage
from bloomery.types.ids import new_id

DEFAULT_TOKENS: Final = 4096
"""That a judge may say whose grader does not tell: one that never comes to its result costs no more."""
_FIELD: Final = "input"


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What serves models."""

    models: Models
    rendering: Rendering
    sampling: Sampling
    limits: RateLimits


class OwnModels:
    """Those that one caller may ask."""

    def __init__(self, served: Served, p: Principal) -> None:
        self._served, self._p = served, p

    async def ask(self, question: Question) -> Answer:
        """One answer of the form that is asked for."""
        target = await self._served.sampling.resolve(self._p, question.model)
        prompt = await self._served.rendering.prompt(target.base_hash, [_plain(message) for message in question.messages])
        form = None if question.schema is None else Grammar(kind="json_schema", text=json.dumps(question.schema, ensure_ascii=False))
        grammar = await checked_grammar(form, _FIELD, None, None)
        generate = self._generate(target, prompt, question, grammar)
        tokens, whole = await self._sampled(target, generate)
        ends = generate.params.stop_tokens
        text = self._served.models.tokenizer(target.base_hash).decode([token for token in tokens if token not in ends])
        return Answer(text, GradeUsage(prompt_tokens=len(prompt), completion_tokens=len(tokens)), whole)

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        target = await self._served.sampling.resolve(self._p, model)
        inputs = await self._served.rendering.encode(target.base_hash, texts, [_FIELD] * len(texts))
        context = self._served.models.size(target.base_hash).context
        for tokens in inputs:
            if not 0 < len(tokens) < context:
                raise InvalidInput(f"a text has {len(tokens)} tokens: the model takes 1 to {context - 1}", field=_FIELD)
        count = sum(map(len, inputs))
        self._served.limits.rollout(self._p, count, field=_FIELD)
        try:
            vectors = [(await embedded(self._served.sampling, self._p, target, tokens)).vector_D.tolist() for tokens in inputs]
        except Exception:
            self._served.limits.give_back(self._p, count)
            raise
        return Vectors(vectors, GradeUsage(prompt_tokens=count))

    async def _sampled(self, target: Target, generate: Generate) -> tuple[list[int], bool]:
        """The tokens of an answer, and whether it came to its end; they are paid for, and its prompt where anything came of it."""
        # A bad request is refused here, before anything is paid for.
        stream = self._served.sampling.stream(self._p, target, generate, bounded=True)
        length = generate.prompt.shape[0]
        self._served.limits.rollout(self._p, length, field=_FIELD)
        said: list[int] = []
        reason = None
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, SampledToken):
                        said.append(event.token)
                    elif isinstance(event, SampleFinished):
                        reason = event.reason
            if reason == "abort":
                raise Unavailable("the engine gave this request up")
        except Exception:
            if not said:
                self._served.limits.give_back(self._p, length)
            raise
        finally:
            self._served.limits.sampled(self._p, len(said))
        return said, reason == "stop"

    def _generate(self, target: Target, prompt: list[int], question: Question, grammar: Grammar | None) -> Generate:
        params, size = question.params, self._served.models.size(target.base_hash)
        if (room := size.context - len(prompt)) < 1:
            problem = f"the judge's prompt has {len(prompt)} tokens and leaves no room in the model's context of {size.context}"
            raise InvalidInput(f"{problem}: shorten it", field=_FIELD)
        return Generate(
            request_id=new_id("judge"),
            weights=target.weights,
            prompt=Array.of(np.asarray(prompt, np.int32)),
            params=SamplingParams(
                max_tokens=min(room, params.max_completions_tokens or DEFAULT_TOKENS),
                seed=draw_seed(params.seed),
                temperature=1.0 if params.temperature is None else params.temperature,
                top_p=1.0 if params.top_p is None else params.top_p,
                stop_tokens=self._served.models.tokenizer(target.base_hash).end_tokens,
            ),
            priority=target.priority,
            grammar=grammar,
        )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates know it."""
    if not isinstance(message["content"], str):
        raise NotSupported("the models here read text alone: leave images and sound out of the judge's messages", field=_FIELD)
    return {"role": "system" if message["role"] == "developer" else message["role"], "content": message["content"]}
