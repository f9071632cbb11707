"""Rollouts as sequences whose sampled tokens can be scored again, and tokens that are no longer those that were served."""

from collections.abc import Sequence
from typing import NamedTuple

from bloomery.recipes.rollouts import Group, Rollout


class Row(NamedTuple):
    """A prompt and what was sampled behind it."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    temperature: float = 1.0


def row(rollout: Rollout) -> Row:
    """Of one continuation."""
    begun = len(rollout.problem.prompt)
    tokens = rollout.problem.prompt + rollout.tokens
    return Row(tokens, tuple(range(begun, len(tokens))), rollout.logprobs, rollout.versions, rollout.temperature)


def rows(made: Group) -> list[Row]:
    """Of all members."""
    return [row(member.rollout) for member in made.members]


def departure(served: Sequence[int], again: Sequence[int]) -> int | None:
    """The first position of `served` at which `again` has another token, or none; None where `again` goes on from all of it."""
    for place, token in enumerate(served):
        if place >= len(again) or again[place] != token:
            return place
    return None
