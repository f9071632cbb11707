"""The two sides of a fidelity card, of weights in this process: what a sampler says while it samples, and what the trainer's forward says afterwards.

`sample` works as in service: requests of all lengths, some late, in chunks and in company. `trainer_logprobs` is the forward of a training pass over
the same tokens. Both sides are usually one model; a test gives the sampler another. Shapes: R packed rows, N tokens of a sequence, P of its prompt.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.form import Form
from bloomery.models.head import token_logprobs
from bloomery.models.pads import packed_positions, packed_starts, split
from bloomery.models.targets import UNEMBED
from bloomery.types.batching import rows_at_once
from bloomery.types.fidelity import Prompt, Sampled, answers, request
from bloomery.types.generation import SamplerEvent, Weights

_COMPANY = Limits(slots=6, token_budget=160)
"""So few at once that long prompts come in chunks beside others that decode, and some wait."""
_STEPS_BEFORE_LATE = 5


class OneModel:
    """A source of a single model, whatever is asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def weigh(self, weights: Weights) -> int:
        """Nothing is loaded."""
        return 0

    def load(self, weights: Weights) -> Model:
        """The model."""
        return self._model


def sample(model: Model, prompts: Sequence[Prompt], max_tokens: int, form: Form) -> list[Sampled]:
    """All answers to all prompts, of `max_tokens` tokens at temperature 1, in the order of the prompts."""
    sampler = Sampler(model.decoder, OneModel(model), _COMPANY, form=form)
    requests = [request(prompt, Weights(version=model.version), max_tokens, f"{number}") for number, prompt in enumerate(prompts)]
    events: list[SamplerEvent] = []
    for prompt, asked in zip(prompts, requests, strict=True):
        if not prompt.late:
            sampler.submit(asked)
    for _ in range(_STEPS_BEFORE_LATE):
        events += sampler.step()
    for prompt, asked in zip(prompts, requests, strict=True):
        if prompt.late:
            sampler.submit(asked)
    while sampler.busy:
        events += sampler.step()
    return [each for asked in requests for each in answers(asked, events)]


def trainer_logprobs(model: Model, sampled: Sequence[Sampled]) -> list[NDArray[np.float32]]:
    """The log-probabilities [N - P] of the tokens behind each prompt, computed as in training."""
    return [logprobs for part in trainer_passes(model, sampled) for logprobs in part]


def trainer_passes(model: Model, sampled: Sequence[Sampled]) -> Iterator[list[NDArray[np.float32]]]:
    """The same pass by pass, each of no more rows than a pass of training."""
    for part in split([len(each.tokens) for each in sampled], rows_at_once(model.decoder.config.hidden_size)):
        rows = _pass(model, [each.tokens for each in sampled[part]])
        yield [row[len(each.prompt) - 1 :] for row, each in zip(rows, sampled[part], strict=True)]


@torch.no_grad()
def _pass(model: Model, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """The log-probability of every token but the first [N - 1]."""
    lengths = [len(tokens) for tokens in sequences]
    starts = packed_starts(lengths)
    logprobs_R1 = packed_logprobs(model, sequences, packed_hidden(model, sequences), starts)
    return [logprobs_R1[start : start + length - 1, 0].cpu().numpy() for start, length in zip(starts, lengths, strict=False)]


def packed_hidden(model: Model, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states [R, D] of sequences back to back."""
    lengths = [len(tokens) for tokens in sequences]
    starts, device = packed_starts(lengths), model.decoder.device
    tokens_R = torch.zeros(starts[-1], dtype=torch.long)
    for tokens, start in zip(sequences, starts, strict=False):
        tokens_R[start : start + len(tokens)] = torch.tensor(tokens)
    attention = PackedAttention(lengths, exact=True, device=device)
    rows = AdapterRows(((model.adapter, 0, starts[-1]),))
    return model.decoder.hidden(tokens_R.to(device), packed_positions(lengths).to(device), attention, rows)


def packed_logprobs(model: Model, sequences: Sequence[Sequence[int]], hidden_RD: Tensor, starts: Sequence[int]) -> Tensor:
    """The log-probability [R, 1] of what follows each row."""
    next_R1 = torch.zeros(starts[-1], 1, dtype=torch.long)
    for tokens, start in zip(sequences, starts, strict=False):
        next_R1[start : start + len(tokens) - 1, 0] = torch.tensor(tokens[1:])
    factors = None if model.adapter is None else model.adapter.get(UNEMBED)
    return token_logprobs(hidden_RD, model.decoder.head_weight, factors, next_R1.to(hidden_RD.device), model.decoder.config.logit_softcap)
