"""Everything that a request asks about its prompt, and what is known of it while the prompt is prefilled in chunks.

Shapes: P prompt tokens, T rows of a chunk, k likeliest or drawn tokens of a position, C single tokens to score.
"""

import numpy as np
from numpy.typing import NDArray

from bloomery.infer.scoring import PromptScores, Question, joined
from bloomery.types.arrays import Array
from bloomery.types.generation import NO_LOGPROB, Generate, PromptScored


class Inquiry:
    """What a prompt is to be scored for. Rows answer it in order: row i, once computed, says everything about position i + 1."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._length = generate.prompt.shape[0]
        self.first = _first_position(generate)
        """The first position that anything is asked about."""
        self._known = self.first - 1
        """Rows before this one are not needed any more."""
        self._whole = _question(generate)
        self._parts = [_no_scores(generate)]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to ask."""
        return self._known >= self._length - 1

    @property
    def broken(self) -> bool:
        """Whether the weights said something that is no number."""
        return not self._parts[-1].finite

    def question(self, stop: int) -> Question | None:
        """What the rows up to token `stop` can answer that is not known yet; those behind the last answer have just been computed."""
        last = min(stop, self._length - 1)
        return self._whole.part(self._known, last) if self._known < last else None

    def take(self, question: Question, scores: PromptScores) -> None:
        """The answer to a question."""
        self._parts.append(scores)
        self._known = question.start + len(question.next_T)

    def scored(self) -> PromptScored:
        """All answers, when the inquiry is complete."""
        generate, scores = self._generate, joined(self._parts)
        told = {"logprobs": self._column(scores.logprobs_T, np.nan)}
        if generate.prompt_ranks:
            told["ranks"] = self._column(scores.ranks_T.astype(np.int32), 0)
        if generate.prompt_top_k:
            told["top_ids"] = self._column(scores.top_ids_Tk.astype(np.int32), 0)
            told["top_logprobs"] = self._column(scores.top_logprobs_Tk, NO_LOGPROB)
        if generate.targets is not None:
            told["target_logprobs"] = scores.target_logprobs_C
        if generate.prompt_draws:
            told |= {"drawn_ids": scores.drawn_Tk.astype(np.int32), "drawn_logprobs": scores.drawn_logprobs_Tk}
        return PromptScored(request_id=generate.request_id, **{name: Array.of(values) for name, values in told.items()})

    def _column(self, values_T: NDArray[np.generic], unscored: float) -> NDArray[np.generic]:
        """Values of all positions [P, ...]; those before the first that was asked for say that they are none."""
        column_P = np.full((self._length, *values_T.shape[1:]), unscored, values_T.dtype)
        column_P[self.first :] = values_T
        column_P[: self._generate.scored_from] = unscored
        return column_P


def _first_position(generate: Generate) -> int:
    firsts = [generate.prompt.shape[0]]
    if generate.prompt_logprobs or generate.prompt_top_k:
        firsts.append(generate.scored_from)
    if generate.targets is not None:
        firsts.append(int(generate.targets.positions.numpy()[0]))
    if generate.prompt_draws:
        firsts.append(1)
    return min(firsts)


def _question(generate: Generate) -> Question:
    """About every row of the prompt."""
    targets, empty = generate.targets, np.empty(0, np.int64)
    return Question(
        start=0,
        next_T=generate.prompt.numpy()[1:].astype(np.int64),
        top_k=generate.prompt_top_k,
        rows_C=empty if targets is None else targets.positions.numpy().astype(np.int64) - 1,
        ids_C=empty if targets is None else targets.ids.numpy().astype(np.int64),
        draws=generate.prompt_draws,
        params=generate.params,
        ranks=generate.prompt_ranks,
        temperature=generate.scored_temperature,
    )


def _no_scores(generate: Generate) -> PromptScores:
    likeliest, drawn = generate.prompt_top_k, generate.prompt_draws
    return PromptScores(
        logprobs_T=np.empty(0, np.float32),
        top_ids_Tk=np.empty((0, likeliest), np.int64),
        top_logprobs_Tk=np.empty((0, likeliest), np.float32),
        target_logprobs_C=np.empty(0, np.float32),
        drawn_Tk=np.empty((0, drawn), np.int64),
        drawn_logprobs_Tk=np.empty((0, drawn), np.float32),
        ranks_T=np.empty(0, np.int64),
    )
