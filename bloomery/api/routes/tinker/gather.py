"""Events of one sampling request, gathered into the answer of its future.

`Gathering` is fed event by event and says which sample a stop string has just ended; it knows nothing of sockets and engines.
"""

from collections.abc import Callable
from typing import Final

from bloomery.api.routes.tinker.messages import SampleOut
from bloomery.services.serving.stopping import StopStrings
from bloomery.types.arrays import Array
from bloomery.types.generation import LogprobsMode, PromptRouted, PromptScored, SampledToken, SampleFinished
from bloomery.types.kept import KeptTokens, ToldEvent


class Gathering:
    """`watch` makes the watcher of one sample's stop strings (None: there are none); `mode` says whose log-probabilities the sampled tokens have."""

    def __init__(self, num_samples: int, watch: Callable[[], StopStrings] | None, mode: LogprobsMode) -> None:
        self._samples = [_Growing(watch() if watch else None, mode) for _ in range(num_samples)]
        self.mode: Final = mode
        self.scored: PromptScored | None = None
        """What was asked about the prompt."""
        self.prompt_experts: Array | None = None
        """Those of its tokens but the last, where routing was asked."""
        self.prompt_expert_weights: Array | None = None
        """What their answers were multiplied with, where that was asked too."""

    def take(self, event: ToldEvent) -> int | None:
        """Add an event; the number of the sample if its stop string has just come."""
        match event:
            case PromptScored():
                self.scored = event
            case PromptRouted():
                self.prompt_experts, self.prompt_expert_weights = event.experts, event.expert_weights
            case SampledToken():
                return event.sample if self._samples[event.sample].add(event) else None
            case KeptTokens():
                return event.sample if self._samples[event.sample].add_kept(event) else None
            case SampleFinished():
                self._samples[event.sample].finish(hit_limit=event.reason == "length")
        return None

    @property
    def complete(self) -> bool:
        """Whether nothing more is needed; the prompt's score comes before any token."""
        return all(sample.finished for sample in self._samples)

    def samples(self) -> list[SampleOut]:
        """Every sample, in order."""
        return [sample.out() for sample in self._samples]

    def kept(self) -> tuple[int, ...]:
        """How many tokens of each sample its draft had right."""
        return tuple(sample.kept for sample in self._samples)

    def fed_experts(self) -> list[list[Array]]:
        """Those of the tokens that each sample was fed, where routing was asked."""
        return [sample.fed_experts for sample in self._samples]

    def fed_expert_weights(self) -> list[list[Array]]:
        """What their answers were multiplied with, where that was asked too."""
        return [sample.fed_expert_weights for sample in self._samples]


class _Growing:
    """One sample while its tokens come."""

    def __init__(self, watch: StopStrings | None, mode: LogprobsMode) -> None:
        self._watch, self._mode = watch, mode
        self._out = SampleOut([], [], [], hit_limit=False)
        self.finished = False
        self.kept = 0
        self.fed_experts: list[Array] = []
        self.fed_expert_weights: list[Array] = []

    def add(self, event: SampledToken) -> bool:
        """Whether this token completes a stop string. Tokens that were under way when it came are dropped."""
        if self.finished:
            return False
        self._out.tokens.append(event.token)
        self._out.logprobs.append(event.logprob_as(self._mode))
        self.kept += event.kept
        if event.top:
            self._out.top.append(event.top)
        if event.fed_experts is not None:
            self.fed_experts.append(event.fed_experts)
        if event.fed_expert_weights is not None:
            self.fed_expert_weights.append(event.fed_expert_weights)
        if self._watch is not None and self._watch.feed(event.token):
            self.finished = True
        return self.finished

    def add_kept(self, event: KeptTokens) -> bool:
        """The same of many tokens."""
        if self._watch is not None:
            return any(map(self.add, event.apart()))
        if not self.finished:
            self._out.tokens.extend(event.tokens)
            self._out.logprobs.extend(event.logprobs)
            self.kept += len(event.tokens)
        return False

    def finish(self, *, hit_limit: bool) -> None:
        if not self.finished:
            self.finished = True
            self._out = self._out._replace(hit_limit=hit_limit)

    def out(self) -> SampleOut:
        return self._out
