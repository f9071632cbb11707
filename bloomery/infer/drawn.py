"""Tokens that were just chosen, with all that is told of them.

Shapes: B rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bloomery.infer.runner import NextTokens
from bloomery.infer.sampling import Draw, DrawnTokens, choose
from bloomery.types.arrays import Array
from bloomery.types.generation import SampledToken


class Drawn(NamedTuple):
    """One token for each row."""

    draws: Sequence[Draw]
    next_tokens: NextTokens
    chosen: DrawnTokens
    logprobs: list[float]

    @classmethod
    def of(cls, next_tokens: NextTokens, draws: Sequence[Draw]) -> "Drawn":
        """Choose."""
        chosen = choose(next_tokens.logits_BV.numpy(), draws, next_tokens.drawn_logsumexp_B.numpy())
        return cls(draws, next_tokens, chosen, next_tokens.logprobs(torch.from_numpy(chosen.tokens_B)).tolist())

    @property
    def tokens(self) -> list[int]:
        """Their ids."""
        found: list[int] = self.chosen.tokens_B.tolist()
        return found

    def told(
        self, row: int, request_id: str, fed_experts: Array | None = None, fed_expert_weights: Array | None = None, *, kept: bool = False
    ) -> SampledToken:
        """Of one of them, with what its row says."""
        draw, processed = self.draws[row], self.chosen.processed.get(row)
        return SampledToken(
            request_id=request_id,
            sample=draw.sample,
            position=draw.position,
            token=int(self.chosen.tokens_B[row]),
            logprob=self.logprobs[row],
            top=self.next_tokens.top(row, draw.top),
            fed_experts=fed_experts,
            fed_expert_weights=fed_expert_weights,
            processed_logprob=None if processed is None else processed.logprob,
            processed_top=None if processed is None else processed.top,
            kept=kept,
        )
