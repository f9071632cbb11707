"""One request while it is served: its tokens, what is known of its prompt, and when its samples are done.

Shapes: P prompt tokens, T tokens of a chunk, k likeliest tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bloomery.infer.plan import Sample
from bloomery.infer.runner import Model, PromptScores
from bloomery.infer.sampling import Draw
from bloomery.models.config import DecoderConfig
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, InvalidInput
from bloomery.types.generation import NO_LOGPROB, FinishReason, Generate, PromptScored


class Request:
    """A request and the samples of it that are not finished."""

    def __init__(self, generate: Generate, model: Model) -> None:
        self.generate, self.model = generate, model
        self.prompt: list[int] = generate.prompt.numpy().tolist()
        self.continuations: dict[int, list[int]] = {index: [] for index in range(generate.num_samples)}
        """Sampled tokens of each open sample."""
        self._stop_tokens = frozenset(generate.params.stop_tokens)
        self._scores: list[PromptScores] = []
        self._scored = 0
        self._to_score = len(self.prompt) - 1 if generate.prompt_logprobs or generate.prompt_top_k else 0
        self._score_owed = generate.prompt_logprobs or generate.prompt_top_k > 0

    def samples(self) -> list[Sample]:
        """All samples as the plan sees them."""
        request_id, length, decodes = self.generate.request_id, len(self.prompt), self.generate.params.max_tokens > 0
        return [Sample(request_id, index, shared=length - 1, length=length, decodes=decodes) for index in self.continuations]

    def tokens(self, index: int, start: int, stop: int) -> list[int]:
        """Tokens of prompt and continuation at positions `start` to `stop`."""
        prompt, sampled = self.prompt, self.continuations[index]
        return prompt[start:stop] + sampled[max(0, start - len(prompt)) : max(0, stop - len(prompt))]

    def draw(self, index: int) -> Draw:
        """The next token to choose."""
        return Draw(index, len(self.continuations[index]), self.generate.params)

    def append(self, index: int, token: int, context: int) -> FinishReason | None:
        """Take a sampled token; returns why the sample ends with it, if it does."""
        continuation = self.continuations[index]
        continuation.append(token)
        if token in self._stop_tokens:
            return "stop"
        full = len(continuation) == self.generate.params.max_tokens or len(self.prompt) + len(continuation) == context
        return "length" if full else None

    def unscored(self, start: int, stop: int) -> list[int]:
        """What follows each of the prompt tokens `start` to `stop`, or nothing where that is not asked or known already."""
        return self.prompt[start + 1 : stop + 1] if start <= self._scored < min(stop, self._to_score) else []

    def add_scores(self, start: int, scores: PromptScores) -> None:
        """Take the scores of a chunk; a chunk that is prefilled for the second time may overlap what is known."""
        self._scores.append(scores.without(self._scored - start))
        self._scored = start + len(scores.logprobs_T)

    def take_score(self) -> PromptScored | None:
        """The finished score of the prompt, once."""
        if not self._score_owed or self._scored < self._to_score:
            return None
        self._score_owed = False
        ids_Pk, top_Pk = self._top_columns()
        return PromptScored(
            request_id=self.generate.request_id,
            logprobs=_column([scores.logprobs_T for scores in self._scores], math.nan),
            top_ids=ids_Pk,
            top_logprobs=top_Pk,
        )

    def _top_columns(self) -> tuple[Array | None, Array | None]:
        width = self.generate.prompt_top_k
        if not width:
            return None, None
        ids = [scores.top_ids_Tk.int() for scores in self._scores if scores.top_ids_Tk is not None]
        values = [scores.top_logprobs_Tk for scores in self._scores if scores.top_logprobs_Tk is not None]
        return _column([torch.zeros(1, width, dtype=torch.int32), *ids]), _column([torch.full((1, width), NO_LOGPROB), *values])


def check(generate: Generate, config: DecoderConfig, *, taken: bool) -> None:
    """Refuse what cannot be sampled; the message names what to change."""
    prompt, params = generate.prompt, generate.params
    if taken:
        raise Conflict(f"request `{generate.request_id}` is being served already: choose a fresh id", field="request_id")
    if len(prompt.shape) != 1 or prompt.shape[0] < 1 or prompt.dtype == "float32":
        raise InvalidInput(f"the prompt is {prompt.dtype}{list(prompt.shape)}: send at least one token id as int32 [P]", field="prompt")
    room = config.context - prompt.shape[0]
    if room < (params.max_tokens > 0):
        raise InvalidInput(f"a prompt of {prompt.shape[0]} tokens leaves no room in the model's context of {config.context}", field="prompt")
    tokens = prompt.numpy()
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InvalidInput(f"prompt token ids must be from 0 to {config.vocab_size - 1}", field="prompt")
    _check_numbers(generate, config.vocab_size)


def _check_numbers(generate: Generate, vocab_size: int) -> None:
    params = generate.params
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidInput(f"temperature is {params.temperature}: it must be a finite number of at least 0", field="temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidInput(f"top_p is {params.top_p}: it must be above 0 and at most 1", field="top_p")
    if params.max_tokens == 0 and generate.num_samples != 1:
        raise InvalidInput("max_tokens 0 only scores the prompt: set num_samples to 1", field="num_samples")
    bounds = {
        "top_k": (params.top_k, 0, None),
        "max_tokens": (params.max_tokens, 0, None),
        "num_samples": (generate.num_samples, 1, None),
        "prompt_top_k": (generate.prompt_top_k, 0, vocab_size),
        "top_logprobs": (generate.top_logprobs, 0, vocab_size),
    }
    for name, (value, least, most) in bounds.items():
        if value < least or (most is not None and value > most):
            raise InvalidInput(f"{name} is {value}: it must be at least {least}" + (f" and at most {most}" if most is not None else ""), field=name)


def _column(parts: Sequence[Tensor], first: float | None = None) -> Array:
    head = [] if first is None else [torch.full((1,), first)]
    return Array.of(np.concatenate([part.numpy() for part in (*head, *parts)]))
