"""Sampling: names become weights, requests become streams that survive the process that samples them.

`Sampling.stream` checks a request and submits it to who answers such requests of its base (`fleet`). When that process goes
away the request is submitted again, to another replica or to the same one when it is back, with the tokens that were passed on: the noise of a
token depends on seed, sample and position alone, so the answer goes on with the same ones. The last of them is sampled once more, to see that it
does. Where more than tokens is asked, everything is computed again and what was passed on is dropped. Who is to answer is waited for within a
deadline; what bounds the wait for tokens is the pulse of the connection.

A request is of one version, and its answer goes by that name: tokens of which whoever samples says another version are Corrupt.
"""

import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final, Self

import msgspec

from bloomery.services.access.principal import Principal
from bloomery.services.engines.fleet import Fleet, Group
from bloomery.services.engines.link import EngineLink, EngineLost
from bloomery.services.engines.models import Models
from bloomery.services.serving.meters import Meter, Meters
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.target import Target
from bloomery.services.weights.versions import Versions
from bloomery.types.checks import check_generate
from bloomery.types.errors import Corrupt, Deadly, NotFound, Unavailable
from bloomery.types.generation import (
    Abort,
    Generate,
    GenerateFailed,
    PromptEmbedded,
    PromptFound,
    PromptRouted,
    PromptScored,
    SampledToken,
    SampleFinished,
    Weights,
)
from bloomery.types.ids import new_id
from bloomery.types.kept import KeptTokens, ToldEvent, joined

MAX_SUBMISSIONS: Final = 4
"""In a row without anything new: a request whose process dies so often may be what kills it."""
_DRAWN_BITS: Final = 53
"""Seeds that we draw survive the JSON numbers of any client."""

Progress = PromptScored | PromptRouted | PromptEmbedded | SampledToken | SampleFinished
ProgressTogether = Progress | KeptTokens


class Sampling:
    """Resolves names and samples."""

    def __init__(self, fleet: Fleet, models: Models, deployments: Deployments, versions: Versions, meters: Meters) -> None:
        self._fleet = fleet
        self._meters = meters
        self._models = models
        self._deployments = deployments
        self._versions = versions

    async def resolve(self, p: Principal, model: str) -> Target:
        """The weights behind a deployment's name, a base model's alias, a snapshot's version or a `tinker://` sampler path, where they are served."""
        target = await self._named(p, model)
        self._group(target, production=True)
        return target._replace(patient=p.patient)

    async def served(self, p: Principal) -> list[Target]:
        """Whatever has a name of its own and is served: base models, then deployments."""
        p.require("infer")
        names = dict.fromkeys([*(base.alias for base in self._models.list(p)), *await self._deployments.names(p)])
        targets = [await self._named(p, name) for name in names]
        return [target for target in targets if self.serves(target)]

    def serves(self, target: Target) -> bool:
        """Whether this start of the server was given the base of these weights."""
        return self._fleet.group(target.base_hash, production=True) is not None

    def stream(self, p: Principal, target: Target, request: Generate, *, bounded: bool = False) -> "SampleStream":
        """Events as they come; a bad request is refused here, before the first. The target's weights are used, whatever the request says.

        A `bounded` one is Unavailable, as soon as it is read, where too many samples wait.
        """
        p.require("infer")
        production = request.priority == "production"
        group = self._group(target, production=production)
        check_generate(request, self._models.size(target.base_hash))
        if production:
            self._fleet.want(target.base_hash)
        request = msgspec.structs.replace(request, weights=target.weights)
        return SampleStream(group, request, lambda: self._meters.request(target.base_hash, request, bounded=bounded))

    async def _named(self, p: Principal, model: str) -> Target:
        p.require("infer")
        if (target := await self._deployments.target(p, model)) is not None:
            return target
        found = await self._versions.find(p, model)
        return Target(found.weights, found.base_hash, None, None, model)

    def _group(self, target: Target, *, production: bool) -> Group:
        """Who answers; a deployment or a snapshot may be of a base that this start of the server was not given."""
        group = self._fleet.group(target.base_hash, production=production)
        if group is None:
            what = f"the base model of `{target.display}` ({target.base_hash}) is not served"
            raise NotFound(f"{what}: start the server with `--model DIR` of that base", field="model")
        return group


class SampleStream:
    """The events of one request, once each. Closing it stops the work on it; `abort` stops a single sample."""

    def __init__(self, group: Group, request: Generate, measure: Callable[[], Meter]) -> None:
        self._group = group
        self._link: EngineLink | None = None
        """At whose end the request is in hand."""
        self._numerics: str | None = None
        """Of who gave what was passed on: nobody else's would go with it."""
        self._fruitless = 0
        """How often in a row a process went away without anything new."""
        self._resumable = False
        """Whether who has the request in hand gives the same answer a second time."""
        self._request = request
        self._measure = measure
        self._meter: Meter | None = None
        self._submitted_as: str | None = None
        self._passed = _Passed(request)
        self._aborted: set[int] = set()
        self._events = self._measured()
        self._apart: deque[SampledToken] = deque()
        """Tokens of one event that are still to be told one by one."""

    @property
    def found_tokens(self) -> int:
        """Tokens of the prompt that the engine had the keys and values of; known when the first event is there."""
        return self._passed.found_tokens

    @property
    def more(self) -> bool:
        """Whether another token, or the end of a sample, is there already."""
        return bool(self._apart) or (self._link is not None and self._submitted_as is not None and self._link.holds_more(self._submitted_as))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress:
        if not self._apart:
            event = await anext(self._events)
            if not isinstance(event, KeptTokens):
                return event
            self._apart.extend(event.apart())
        return self._apart.popleft()

    @property
    def together(self) -> AsyncIterator[ProgressTogether]:
        """The same, with tokens that drafts had right in one event: for whoever reads hundreds of them at once."""
        return self._events

    async def aclose(self) -> None:
        """Stop, and have the engine stop."""
        await self._events.aclose()

    def abort(self, sample: int) -> None:
        """Have one sample finish with reason `abort`: what is there of it is enough."""
        if self._meter is not None:
            self._meter.stopped(sample)
        self._aborted.add(sample)
        self._post_abort(sample)

    async def _measured(self) -> AsyncGenerator[ProgressTogether, None]:
        meter = self._meter = self._measure()
        try:
            async with aclosing(self._submit_until_done()) as events:
                async for event in events:
                    meter.take(event)
                    yield event
        except Exception:
            # Not where the reader goes away, which is none.
            meter.fail()
            raise
        finally:
            meter.close(self.found_tokens)

    async def _submit_until_done(self) -> AsyncGenerator[ProgressTogether, None]:
        while True:
            try:
                async with aclosing(self._submit()) as events:
                    async for event in events:
                        self._fruitless = 0
                        yield event
                return
            except EngineLost as lost:
                if self._numerics is not None and not self._resumable:
                    what = "an engine that is not bit-exact (one of `bloomery up --plain`, say) went away in the middle of this answer"
                    raise Unavailable(f"{what}, and nobody can go on with it; send the request again") from lost
                self._fruitless += 1
                if self._fruitless == MAX_SUBMISSIONS:
                    told = f"whoever worked on this request went away {self._fruitless} times without anything new"
                    raise Deadly(f"{told}, and it may be what kills: {lost.message}") from lost

    async def _submit(self) -> AsyncGenerator[ProgressTogether, None]:
        # A fresh id: an engine that outlived its connection may still be at work on the earlier one.
        request = msgspec.structs.replace(self._request, request_id=new_id("generate"), begun=self._passed.begun())
        # What may be deadly is kept from the engine, where runs are.
        harmless = self._fruitless < (1 if self._numerics is None else 2)
        link, numerics = await self._group.choose(request, self._numerics, with_stand_in=harmless)
        self._resumable = link.welcome is not None and link.welcome.bit_exact
        async with aclosing(link.generate(request)) as events:
            self._link, self._submitted_as = link, request.request_id
            told: set[int] = set()
            # Their samples are whole already, and are asked for again only because the request is one.
            finished = set(self._passed.finished)
            async for event in events:
                over = self._aborted | finished
                for sample in over - told:
                    self._post_abort(sample)
                told |= over
                if (progress := self._passed.fresh(event)) is not None:
                    self._numerics = numerics
                    yield progress

    def _post_abort(self, sample: int) -> None:
        connection = None if self._link is None else self._link.connection
        if self._submitted_as is not None and connection is not None and connection.open:
            connection.post(Abort(request_id=self._submitted_as, sample=sample))


class _Passed:
    """What was passed on already: tokens by sample, samples that ended, the prompt's scores and its routing."""

    def __init__(self, request: Generate) -> None:
        self.found_tokens = 0
        self._weights = request.weights
        self._asks_more = request.scores_prompt or request.routing or request.embed
        self._tokens: list[list[int]] = [[] for _ in range(request.num_samples)]
        self.finished: set[int] = set()
        self._scored = self._routed = self._embedded = False

    def begun(self) -> tuple[tuple[int, ...], ...]:
        """What the next process need not sample: all tokens but the last of each sample."""
        if self._asks_more:
            return ()
        begun = tuple(() if sample in self.finished else tuple(tokens[:-1]) for sample, tokens in enumerate(self._tokens))
        return begun if any(begun) else ()

    def fresh(self, event: ToldEvent) -> ProgressTogether | None:
        """What of the event is news; None for a repetition."""
        match event:
            case GenerateFailed():
                raise event.error()
            case PromptFound(tokens=tokens):
                self.found_tokens = tokens
                return None
            case PromptScored():
                repeated, self._scored = self._scored, True
            case PromptRouted():
                repeated, self._routed = self._routed, True
            case PromptEmbedded():
                repeated, self._embedded = self._embedded, True
            case SampledToken():
                self._check_version(event)
                repeated = self._repeats(event)
            case KeptTokens():
                self._check_version(event)
                return self._fresh_of(event)
            case SampleFinished(sample=sample):
                repeated = sample in self.finished
                self.finished.add(sample)
        return None if repeated else event

    def _check_version(self, event: SampledToken | KeptTokens) -> None:
        if isinstance(self._weights, Weights) and event.version not in (None, self._weights.version):
            told = f"version `{self._weights.version}` was asked for, and whoever samples says version `{event.version}` of token {event.position}"
            raise Corrupt(f"{told}: no more of this answer is passed on; send the request again, and look at the log of that process")

    def _fresh_of(self, event: KeptTokens) -> SampledToken | KeptTokens | None:
        tokens = self._tokens[event.sample]
        if event.position == len(tokens) and event.sample not in self.finished:
            tokens += event.tokens
            return event
        fresh = [each for each in event.apart() if not self._repeats(each)]
        return joined(fresh) if fresh else None

    def _repeats(self, event: SampledToken) -> bool:
        tokens = self._tokens[event.sample]
        if event.position == len(tokens) and event.sample not in self.finished:
            tokens.append(event.token)
            return False
        if event.sample not in self.finished and tokens[event.position] != event.token:
            # Half of one answer and half of another would be neither.
            raise Unavailable("the restarted engine answers differently (its numerics changed); send the request again")
        return True


def draw_seed(seed: int | None) -> int:
    """The seed given, or a drawn one; either way it is recorded, and gives the same answer again."""
    return secrets.randbits(_DRAWN_BITS) if seed is None else seed
