"""Requests, adapters, and the slow oracle: a sampler that computes everything anew for every token."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.infer.sampling import Draw, choose
from bloomery.infer.versions import Model
from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.experts import Routing
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.head import logits, token_logprobs
from bloomery.models.pads import ROW_PAD, packed_positions, pad_to
from bloomery.models.targets import UNEMBED, adapter_targets
from bloomery.types.arrays import Array
from bloomery.types.generation import (
    Generate,
    GenerateFailed,
    PromptFound,
    PromptScored,
    SampledToken,
    SampleFinished,
    SamplerEvent,
    SamplingParams,
    Weights,
)
from tests.train.builders import VOCAB

BASE = Weights(version="base")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def request(
    request_id: str, tokens: Sequence[int], *, version: str = "base", num_samples: int = 1, asked: dict[str, object] | None = None, **params: object
) -> Generate:
    return Generate(
        request_id=request_id,
        weights=Weights(version=version, key=None if version == "base" else f"snapshots/{version}"),
        prompt=Array.of(np.asarray(tokens, np.int32)),
        params=SamplingParams(**{"max_tokens": 8, "seed": 1, **params}),
        num_samples=num_samples,
        **(asked or {}),
    )


def adapter(decoder: Decoder, seed: int, rank: int = 16) -> FusedAdapter:
    """A random adapter on everything that changes the logits noticeably."""
    generator = torch.Generator().manual_seed(seed)
    targets, factors = adapter_targets(decoder.config), {}
    for name, target in targets.items():
        a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in target.factor_shapes(rank))
        factors[name] = Factors(*(factor.to(decoder.device, decoder.dtype) for factor in (a, b)))
    return fuse(targets, factors, 2.0)


class Adapters:
    """Loads these versions, adapters over one decoder or models of their own, and counts how often."""

    def __init__(self, decoder: Decoder, by_version: Mapping[str, FusedAdapter | Decoder] | None = None) -> None:
        self.decoder, self.by_version = decoder, by_version or {}
        self.loads: list[str] = []

    def weigh(self, weights: Weights) -> int:
        found = self.by_version.get(weights.version)
        return sum(tensor.nbytes for tensor in found.parameters()) if isinstance(found, Decoder) else 0

    def load(self, weights: Weights) -> Model:
        self.loads.append(weights.version)
        found = None if weights.key is None else self.by_version[weights.version]
        return Model(weights.version, found, None) if isinstance(found, Decoder) else Model(weights.version, self.decoder, found)


def sampler(decoder: Decoder, adapters: Mapping[str, FusedAdapter | Decoder] | None = None, limits: Limits | None = None) -> Sampler:
    return Sampler(decoder, Adapters(decoder, adapters), limits)


class Answer(NamedTuple):
    """What came back for one request."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float]]
    top: dict[int, list[tuple[tuple[int, float], ...]]]
    reasons: dict[int, str]
    score: PromptScored | None
    failure: GenerateFailed | None
    found: int = 0
    """Prompt tokens that nobody had to compute."""

    @property
    def told(self) -> "Answer":
        """The answer without how it came about: neither what was found, nor in which order its samples ended."""
        by_sample = {name: dict(sorted(getattr(self, name).items())) for name in ("tokens", "logprobs", "top", "reasons")}
        return self._replace(found=0, **by_sample)


def drain(engine: Sampler) -> list[SamplerEvent]:
    events: list[SamplerEvent] = []
    while engine.busy:
        events += engine.step()
    return events


def answers(events: Iterable[SamplerEvent]) -> dict[str, Answer]:
    """Events by request; positions must be complete and in order."""
    found: dict[str, Answer] = {}
    for event in events:
        answer = found.setdefault(event.request_id, Answer({}, {}, {}, {}, None, None))
        match event:
            case SampledToken():
                tokens = answer.tokens.setdefault(event.sample, [])
                assert event.position == len(tokens)
                assert event.sample not in answer.reasons
                tokens.append(event.token)
                answer.logprobs.setdefault(event.sample, []).append(event.logprob)
                answer.top.setdefault(event.sample, []).append(event.top)
            case SampleFinished():
                answer.reasons[event.sample] = event.reason
            case PromptScored():
                found[event.request_id] = answer._replace(score=event)
            case PromptFound(tokens=tokens):
                assert answer == Answer({}, {}, {}, {}, None, None)
                found[event.request_id] = answer._replace(found=tokens)
            case GenerateFailed():
                found[event.request_id] = answer._replace(failure=event)
    return found


def generate(engine: Sampler, *requests: Generate) -> dict[str, Answer]:
    for each in requests:
        engine.submit(each)
    return answers(drain(engine))


def full_hidden(decoder: Decoder, tokens: Sequence[int], weights: FusedAdapter | None, routing: Routing | None = None) -> torch.Tensor:
    """The trainer's forward over one whole sequence."""
    rows = pad_to(len(tokens), ROW_PAD)
    padded = torch.tensor([*tokens, *[0] * (rows - len(tokens))])
    with torch.no_grad():
        attention = PackedAttention([len(tokens)], exact=True)
        return decoder.hidden(padded, packed_positions([len(tokens)]), attention, AdapterRows(((weights, 0, rows),)), routing)


def full_routing(decoder: Decoder, tokens: Sequence[int], weights: FusedAdapter | None) -> np.ndarray:
    """Where the trainer's forward sends every token [N, L, T]."""
    return full_routed(decoder, tokens, weights)[0]


def full_routed(decoder: Decoder, tokens: Sequence[int], weights: FusedAdapter | None) -> tuple[np.ndarray, np.ndarray]:
    """Where the trainer's forward sends every token, and what it multiplies the answers with [N, L, T]."""
    routing = Routing()
    full_hidden(decoder, tokens, weights, routing)
    return routing.chosen_RLT[: len(tokens)].numpy(), routing.weights_RLT[: len(tokens)].float().numpy()


def full_logprobs(decoder: Decoder, tokens: Sequence[int], weights: FusedAdapter | None) -> np.ndarray:
    """The trainer's log-probability of every token after the first."""
    hidden = full_hidden(decoder, tokens, weights)
    targets = torch.zeros(len(hidden), 1, dtype=torch.long)
    targets[: len(tokens) - 1, 0] = torch.tensor(list(tokens[1:]))
    factors = weights.get(UNEMBED) if weights is not None else None
    with torch.no_grad():
        return token_logprobs(hidden, decoder.head_weight, factors, targets, decoder.config.logit_softcap)[: len(tokens) - 1, 0].numpy()


def naive(
    decoder: Decoder, tokens: Sequence[int], params: SamplingParams, weights: FusedAdapter | None = None, sample: int = 0
) -> tuple[list[int], list[float]]:
    """Sample one continuation with a whole forward per token, and score it with one forward at the end."""
    sequence = list(tokens)
    for position in range(params.max_tokens):
        hidden = full_hidden(decoder, sequence, weights)
        last = (len(sequence) - 1) // ROW_PAD * ROW_PAD
        factors = weights.get(UNEMBED) if weights is not None else None
        with torch.no_grad():
            row = logits(hidden[last : last + ROW_PAD], decoder.head_weight, factors, decoder.config.logit_softcap)[len(sequence) - 1 - last]
        draw = Draw(sample, position, params, tokens, sequence[len(tokens) :])
        sequence.append(int(choose(row[None].numpy(), [draw]).tokens_B[0]))
    return sequence[len(tokens) :], full_logprobs(decoder, sequence, weights)[len(tokens) - 1 :].tolist()
