"""Sampling: names become weights, requests become streams that survive a restart of the engine.

`Sampling.stream` checks a request and submits it to the engine of its base. When the engine goes away the request is submitted again: the noise
of a token depends on seed, sample and position alone, so the answer begins with what was passed on already, and that is dropped. The engine link
puts a deadline on every wait.
"""

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final, NamedTuple, Self

import msgspec

from bloomery.services.deployments import Deployments
from bloomery.services.engines import EngineLink, EngineLost
from bloomery.services.models import Models
from bloomery.services.principal import Principal
from bloomery.services.target import Target
from bloomery.services.versions import Versions
from bloomery.types.checks import check_generate, check_seed
from bloomery.types.errors import InvalidInput, NotFound, Unavailable, WorkerError
from bloomery.types.generation import (
    Abort,
    FinishReason,
    Generate,
    GenerateFailed,
    PromptFound,
    PromptRouted,
    PromptScored,
    SampledToken,
    SampleFinished,
    SamplerEvent,
)
from bloomery.types.ids import new_id

MAX_SUBMISSIONS: Final = 4
"""A request whose engine dies so often may be what kills it."""
_DRAWN_BITS: Final = 53
"""Seeds that we draw survive the JSON numbers of any client."""

Progress = PromptScored | PromptRouted | SampledToken | SampleFinished


class Sample(NamedTuple):
    """One finished continuation."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]
    reason: FinishReason


class Completion(NamedTuple):
    """Everything that a request gave, and the version of the weights that gave it."""

    samples: list[Sample]
    prompt: PromptScored | None
    version: str


class Sampling:
    """Resolves names and samples."""

    def __init__(self, links: Mapping[str, EngineLink], models: Models, deployments: Deployments, versions: Versions) -> None:
        self._links = links
        self._models = models
        self._deployments = deployments
        self._versions = versions

    async def resolve(self, p: Principal, model: str) -> Target:
        """The weights behind a deployment's name, a base model's alias, a snapshot's version or a `tinker://` sampler path."""
        p.require("infer")
        if (target := await self._deployments.target(p, model)) is not None:
            return target
        found = await self._versions.find(p, model)
        return Target(found.weights, found.base_hash, None, None, model)

    def stream(self, p: Principal, target: Target, request: Generate) -> "SampleStream":
        """Events as they come; a bad request is refused here, before the first. The target's weights are used, whatever the request says."""
        p.require("infer")
        check_generate(request, self._models.size(target.base_hash))
        if target.base_hash not in self._links:
            what = f"the base model of `{target.display}` ({target.base_hash}) is not served"
            raise NotFound(f"{what}: start the server with `--model DIR` of that base", field="model")
        return SampleStream(self._links[target.base_hash], msgspec.structs.replace(request, weights=target.weights))

    async def complete(self, p: Principal, target: Target, request: Generate) -> Completion:
        """The whole answer at once."""
        p.require("infer")
        samples = [Sample([], [], [], "abort") for _ in range(request.num_samples)]
        prompt = None
        async with aclosing(self.stream(p, target, request)) as events:
            async for event in events:
                match event:
                    case PromptScored():
                        prompt = event
                    case SampledToken():
                        _append(samples[event.sample], event)
                    case SampleFinished():
                        samples[event.sample] = samples[event.sample]._replace(reason=event.reason)
        return Completion(samples, prompt, target.weights.version)


class SampleStream:
    """The events of one request, once each. Closing it stops the engine's work on it; `abort` stops a single sample."""

    def __init__(self, link: EngineLink, request: Generate) -> None:
        self._link = link
        self._request = request
        self._submitted_as: str | None = None
        self._passed = _Passed(request)
        self._aborted: set[int] = set()
        self._events = self._submit_until_done()

    @property
    def found_tokens(self) -> int:
        """Tokens of the prompt that the engine had the keys and values of; known when the first event is there."""
        return self._passed.found_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Stop, and have the engine stop."""
        await self._events.aclose()

    def abort(self, sample: int) -> None:
        """Have one sample finish with reason `abort`."""
        self._aborted.add(sample)
        self._post_abort(sample)

    async def _submit_until_done(self) -> AsyncGenerator[Progress, None]:
        for submission in range(1, MAX_SUBMISSIONS + 1):
            try:
                async with aclosing(self._submit()) as events:
                    async for event in events:
                        yield event
                return
            except EngineLost as lost:
                if submission == MAX_SUBMISSIONS:
                    raise Unavailable(f"the engine went away {submission} times while it worked on this request: {lost.message}") from lost

    async def _submit(self) -> AsyncGenerator[Progress, None]:
        # A fresh id: an engine that outlived its connection may still be at work on the earlier one.
        request = msgspec.structs.replace(self._request, request_id=new_id("generate"))
        async with aclosing(self._link.generate(request)) as events:
            self._submitted_as = request.request_id
            told: set[int] = set()
            async for event in events:
                for sample in self._aborted - told:
                    self._post_abort(sample)
                told |= self._aborted
                if (progress := self._passed.fresh(event)) is not None:
                    yield progress

    def _post_abort(self, sample: int) -> None:
        connection = self._link.connection
        if self._submitted_as is not None and connection is not None and connection.open:
            connection.post(Abort(request_id=self._submitted_as, sample=sample))


class _Passed:
    """What was passed on already: tokens by sample, samples that ended, the prompt's scores and its routing."""

    def __init__(self, request: Generate) -> None:
        self.found_tokens = 0
        self._tokens: list[list[int]] = [[] for _ in range(request.num_samples)]
        self._finished: set[int] = set()
        self._scored = self._routed = False

    def fresh(self, event: SamplerEvent) -> Progress | None:
        """The event if it is news; None for a repetition."""
        match event:
            case GenerateFailed(message=message, category=category):
                raise InvalidInput(message) if category == "user" else WorkerError(message)
            case PromptFound(tokens=tokens):
                self.found_tokens = tokens
                return None
            case PromptScored():
                repeated, self._scored = self._scored, True
            case PromptRouted():
                repeated, self._routed = self._routed, True
            case SampledToken():
                repeated = self._repeats(event)
            case SampleFinished(sample=sample):
                repeated = sample in self._finished
                self._finished.add(sample)
        return None if repeated else event

    def _repeats(self, event: SampledToken) -> bool:
        tokens = self._tokens[event.sample]
        if event.position == len(tokens) and event.sample not in self._finished:
            tokens.append(event.token)
            return False
        if event.sample not in self._finished and tokens[event.position] != event.token:
            # Half of one answer and half of another would be neither.
            raise Unavailable("the restarted engine answers differently (its numerics changed); send the request again")
        return True


def draw_seed(seed: int | None) -> int:
    """The seed given, or a drawn one; either way it is recorded, and gives the same answer again."""
    if seed is None:
        return secrets.randbits(_DRAWN_BITS)
    check_seed(seed)
    return seed


def _append(sample: Sample, event: SampledToken) -> None:
    sample.tokens.append(event.token)
    sample.logprobs.append(event.logprob)
    sample.top.append(event.top)
