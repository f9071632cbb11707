"""Tokens that a draft had right, on their way from the process that samples to the one that answers: hundreds come of one step, in one event."""

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from bloomery.types.generation import SampledToken, SamplerEvent
from bloomery.types.wire import Wire


class KeptTokens(Wire, frozen=True, tag="kept", omit_defaults=True):
    """Consecutive tokens of a sample that its draft had right, of each of which nothing but its log-probability is told."""

    request_id: str
    sample: int
    position: int
    """Of the first."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str | None = None
    """Of the first, where it says one."""

    def apart(self) -> list[SampledToken]:
        """Each for itself."""
        request_id, sample, first = self.request_id, self.sample, self.position
        return [
            SampledToken(
                request_id=request_id,
                sample=sample,
                position=position,
                token=token,
                logprob=logprob,
                version=self.version if position == first else None,
                kept=True,
            )
            for position, (token, logprob) in enumerate(zip(self.tokens, self.logprobs, strict=True), first)
        ]


ToldEvent = SamplerEvent | KeptTokens
"""What a process that samples says."""


def apart(event: ToldEvent) -> Sequence[SamplerEvent]:
    """The same, with an event for each token."""
    return event.apart() if isinstance(event, KeptTokens) else (event,)


def together(events: Iterable[SamplerEvent]) -> tuple[ToldEvent, ...]:
    """The same events, with tokens that were kept one behind the other in one."""
    told: list[SamplerEvent | list[SampledToken]] = []
    for event in events:
        if not _joins(event):
            told.append(event)
        elif told and isinstance(last := told[-1], list) and _follows(event, last[-1]):
            last.append(event)
        else:
            told.append([event])
    return tuple(joined(each) if isinstance(each, list) else each for each in told)


def joined(run: Sequence[SampledToken]) -> KeptTokens:
    """Such tokens, at least one, of which each follows the one before."""
    first = run[0]
    return KeptTokens(
        request_id=first.request_id,
        sample=first.sample,
        position=first.position,
        tokens=tuple([each.token for each in run]),
        logprobs=tuple([each.logprob for each in run]),
        version=first.version,
    )


def _joins(event: SamplerEvent) -> TypeGuard[SampledToken]:
    """Whether it is a token of which a run of others says as much."""
    return isinstance(event, SampledToken) and event.kept and not event.top and event.fed_experts is None and event.processed_logprob is None


def _follows(event: SampledToken, last: SampledToken) -> bool:
    return event.version is None and (event.request_id, event.sample, event.position) == (last.request_id, last.sample, last.position + 1)
