"""What the model says about the tokens of a prompt, read off the logits of its rows.

Shapes: R rows, T rows that are asked about, V vocabulary, k likeliest or drawn tokens, C single tokens to score.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.sampling import Floats, Integers, draw_alternatives
from bloomery.models.head import logsumexp, tempered
from bloomery.models.pads import ROW_PAD
from bloomery.types.generation import SamplingParams

_CHUNK_BYTES: Final = 32 << 20
_CHUNK_ROWS: Final = 64


class Question(NamedTuple):
    """What is asked about consecutive rows of a prompt, of which row 0 predicts the token at position `start` + 1."""

    start: int
    next_T: Integers
    top_k: int
    rows_C: Integers
    """Row of each single token, from 0, never falling."""
    ids_C: Integers
    draws: int
    params: SamplingParams
    ranks: bool = False
    temperature: float = 1.0
    """Of the distribution whose log-probabilities are told."""

    def part(self, start: int, stop: int) -> "Question":
        """The same about rows `start` to `stop` alone."""
        first, last = np.searchsorted(self.rows_C, (start, stop))
        return self._replace(
            start=self.start + start,
            next_T=self.next_T[start:stop],
            rows_C=self.rows_C[first:last] - start,
            ids_C=self.ids_C[first:last],
        )


class PromptScores(NamedTuple):
    """Log-probabilities of the tokens after the rows [T] and of single tokens [C]; the likeliest and the drawn tokens with theirs [T, k].

    `ranks_T`: the place of the token after a row among all, 1 for the likeliest; 0 where nobody asks.
    """

    logprobs_T: Floats
    top_ids_Tk: Integers
    top_logprobs_Tk: Floats
    target_logprobs_C: Floats
    drawn_Tk: Integers
    drawn_logprobs_Tk: Floats
    ranks_T: Integers

    @property
    def finite(self) -> bool:
        """Whether the weights gave numbers."""
        return bool(np.isfinite(self.logprobs_T).all() and np.isfinite(self.target_logprobs_C).all())


def chunk_rows(vocab_size: int) -> int:
    """Rows whose logits exist at once."""
    return max(_CHUNK_ROWS, _CHUNK_BYTES // (4 * vocab_size) // ROW_PAD * ROW_PAD)


def answer(logits_RV: Tensor, skip: int, question: Question) -> PromptScores:
    """Answer the question about the rows behind the first `skip`; rows behind those that are asked about are pads."""
    told_RV = logits_RV if question.temperature == 1 else tempered(logits_RV.clone(), question.temperature)
    # Reduced before any row goes, so that the reduction too sees a multiple of `ROW_PAD` rows, as in the trainer.
    lse_R1 = logsumexp(told_RV)[:, None]
    rows = slice(skip, skip + len(question.next_T))
    logits_TV, told_TV, lse_T1 = logits_RV[rows], told_RV[rows], lse_R1[rows]
    top = told_TV.topk(question.top_k, dim=-1)
    drawn_Tk = _drawn(logits_TV, question)
    cells, ids_C = (torch.from_numpy(each).to(logits_RV.device) for each in (question.rows_C, question.ids_C))
    return PromptScores(
        logprobs_T=_numpy(_of(told_TV, lse_T1, question.next_T[:, None]))[:, 0],
        top_ids_Tk=_numpy(top.indices),
        top_logprobs_Tk=_numpy(top.values - lse_T1),
        target_logprobs_C=_numpy(told_TV[cells, ids_C] - lse_T1[cells, 0]),
        drawn_Tk=drawn_Tk,
        drawn_logprobs_Tk=_numpy(_of(told_TV, lse_T1, drawn_Tk)),
        ranks_T=_ranks(logits_TV, question),
    )


def joined(parts: list[PromptScores]) -> PromptScores:
    """The answers about consecutive rows as one."""
    return PromptScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _of(logits_TV: Tensor, lse_T1: Tensor, ids_Tk: Integers) -> Tensor:
    return logits_TV.gather(1, torch.from_numpy(ids_Tk).to(logits_TV.device)) - lse_T1


def _ranks(logits_TV: Tensor, question: Question) -> Integers:
    if not question.ranks:
        return np.zeros(len(question.next_T), np.int64)
    next_T1 = torch.from_numpy(question.next_T[:, None]).to(logits_TV.device)
    return 1 + _numpy((logits_TV > logits_TV.gather(1, next_T1)).sum(-1))


def _drawn(logits_TV: Tensor, question: Question) -> Integers:
    if not question.draws:
        return np.empty((len(question.next_T), 0), np.int64)
    positions = np.arange(question.start + 1, question.start + 1 + len(question.next_T))
    return draw_alternatives(_numpy(logits_TV), positions, question.draws, question.params)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
