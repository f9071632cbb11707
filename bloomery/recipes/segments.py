"""The answers of a rollout laid out as what is trained on: sequences of the very tokens that were served, in which only sampled ones have a loss.

An answer whose prompt begins with all tokens of a sequence goes on with it: what was put between, by tools, users and the template, is there to be
read and has no loss. Any other prompt begins a sequence of its own: a branch, a sub-agent, or a conversation whose earlier answers the template
writes in other words than were sampled. The last is a drift, and is noted with its place. Nothing is tokenised here, so nothing is changed.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """One answer as it was served: [P] tokens of its prompt, [T] sampled ones with their log-probabilities."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    stopped: bool
    """By an end token; otherwise its length cut it off."""
    continues: str | None = None
    """The answer that its conversation goes on from, message by message."""
    temperature: float = 1.0
    """At which it was drawn."""


class Segment(NamedTuple):
    """[N] tokens in a row. `places` are those of the [S] sampled ones, ascending, of which the other fields tell one by one."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    turns: tuple[str, ...]
    """The answer that each was sampled in."""
    drift: int | None = None
    """Where its prompt departs from the tokens of the conversation that it goes on from; None where it does not, or goes on from none."""
    temperature: float = 1.0
    """At which all of them were drawn, and of which the log-probabilities are."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """The sampled tokens."""
        return tuple(self.tokens[place] for place in self.places)


def single(
    prompt: Sequence[int], turn: str, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[str], temperature: float = 1.0
) -> Segment:
    """A prompt and what was sampled behind it."""
    places = tuple(range(len(prompt), len(prompt) + len(tokens)))
    return Segment((*prompt, *tokens), places, tuple(logprobs), tuple(versions), (turn,) * len(tokens), temperature=temperature)


def assemble(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """The same for the same turns, in whatever order they were answered: sub-agents that run side by side decide nothing."""
    by_id = {turn.id: turn for turn in turns}
    segments: list[Segment] = []
    for turn in sorted(turns, key=lambda turn: (len(turn.prompt), turn.prompt, turn.tokens)):
        begun = [place for place, segment in enumerate(segments) if _goes_on(turn, segment)]
        if begun:
            longest = max(begun, key=lambda place: len(segments[place].tokens))
            segments[longest] = _extended(segments[longest], turn)
        else:
            segments.append(_begun(turn, by_id.get(turn.continues or "")))
    return tuple(segments)


def _goes_on(turn: Turn, segment: Segment) -> bool:
    """A sequence is of one temperature, which its loss computes."""
    return turn.prompt[: len(segment.tokens)] == segment.tokens and turn.temperature == segment.temperature


def _extended(segment: Segment, turn: Turn) -> Segment:
    added = _alone(turn)
    return added._replace(
        places=segment.places + added.places,
        logprobs=segment.logprobs + added.logprobs,
        versions=segment.versions + added.versions,
        turns=segment.turns + added.turns,
        drift=segment.drift,
    )


def _begun(turn: Turn, before: Turn | None) -> Segment:
    segment = _alone(turn)
    return segment if before is None else segment._replace(drift=_departure(turn.prompt, before.prompt + before.tokens))


def _alone(turn: Turn) -> Segment:
    return single(turn.prompt, turn.id, turn.tokens, turn.logprobs, (turn.version,) * len(turn.tokens), turn.temperature)


def _departure(prompt: Sequence[int], served: Sequence[int]) -> int | None:
    """Where a prompt is no longer what was served; None where it is all of that, and another answer went on from there first."""
    same = next((place for place, (now, then) in enumerate(zip(prompt, served, strict=False)) if now != then), min(len(prompt), len(served)))
    return None if same == len(served) else same
