"""One served inference becomes a row and, where its body is kept, a compressed body. Pure: no queue, no disk.

Redaction happens here, before anything is written. When it replaced something, the body goes without token ids and log-probabilities,
because decoding them would spell what was replaced.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import zstandard
from blake3 import blake3

from bloomery.services.data.redaction import REDACTION_VERSION, pseudonym, redact
from bloomery.services.weights.target import Target
from bloomery.types.generation import FinishReason
from bloomery.types.resources import Consent
from bloomery.types.traffic import SpanKind, SpanStatus

DEFAULT_RETENTION_DAYS: Final = 30
_DAY_US: Final = 86_400_000_000
_INPUT_KEYS: Final = ("messages", "prompt", "input")
_CONTENT_KEYS: Final = frozenset({*_INPUT_KEYS, "metadata", "user", "stream", "stream_options", "store"})


class RecordedSample(NamedTuple):
    """What the model said, token by token."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """Everything known about one served request; `id` is the id that the caller got."""

    id: str
    project: str
    kind: SpanKind
    target: Target
    template_hash: str | None
    request: dict[str, Any]
    """The body as the caller sent it."""
    choices: list[dict[str, Any]]
    """As answered: `message` or `text`, and `finish_reason`; log-probabilities belong into `samples`. Vectors are not kept."""
    prompt_tokens: Sequence[int]
    samples: Sequence[RecordedSample]
    seed: int | None
    started_us: int
    duration_us: int
    ttft_us: int | None = None
    """From the start to the first token."""
    status: SpanStatus = "ok"
    error_code: str | None = None
    cached_tokens: int = 0
    """Of the prompt: tokens that another request had computed already."""
    unpaid_tokens: int = 0
    """Of the prompt: tokens that cost nothing, because they were refused before anything came of them."""
    embedded_tokens: int = 0
    """Of texts of which vectors were asked for; these tokens are counted and not kept."""
    unanswered_tokens: int = 0
    """Sampled beside `samples`, in continuations that were not chosen."""
    consent: Consent = "none"
    episode_id: str | None = None
    session_id: str | None = None
    trace_id: str | None = None
    parent_id: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    retention_days: int = DEFAULT_RETENTION_DAYS
    keeps_body: bool = True
    """Whether its content is kept where bodies are."""
    spell: Callable[[Sequence[int]], str] | None = None
    """Where prompt and answers are tokens alone: makes texts of them when the body is written, off the request path."""

    @property
    def in_tokens(self) -> int:
        """All that was given."""
        return self.embedded_tokens + len(self.prompt_tokens)

    @property
    def out_tokens(self) -> int:
        """All that was sampled."""
        return self.unanswered_tokens + sum(len(sample.tokens) for sample in self.samples)


class Prepared(NamedTuple):
    """What is written for one inference; `body` is None where bodies are not kept."""

    row: dict[str, Any]
    body: bytes | None


def prepare(inference: Inference, *, keep_body: bool) -> Prepared:
    """The row and the body of an inference, without secrets."""
    keep_body = keep_body and inference.keeps_body
    clean = redact(_spelled(inference, inference.spell) if keep_body and inference.spell else _as_served(inference))
    tags = redact(inference.tags)
    row = _row(inference) | {"tags": _canonical(tags.value), "redacted": int(clean.changed or tags.changed)}
    if not keep_body:
        return Prepared(row, None)
    tokens = None if clean.changed or inference.kind == "embedding" else _tokens(inference)
    # The id makes bodies unique, so that deleting one span's body never takes another's.
    body = _canonical({"id": inference.id, **clean.value, "tokens": tokens}).encode()
    request, choices = clean.value["request"], clean.value["choices"]
    hashes = {
        "body_ref": f"bodies/{blake3(body).hexdigest()}",
        "input_hash": _digest(next((request[key] for key in _INPUT_KEYS if key in request), None)),
        "output_hash": None if inference.kind == "embedding" else _digest(choices),
    }
    return Prepared(row | hashes, zstandard.compress(body))


def read_body(stored: bytes) -> dict[str, Any]:
    """The body as `prepare` made it."""
    body: dict[str, Any] = json.loads(zstandard.decompress(stored))
    return body


def _as_served(inference: Inference) -> dict[str, Any]:
    return {"request": inference.request, "choices": [_without_logprobs(choice) for choice in inference.choices]}


def _spelled(inference: Inference, spell: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    choices = [{"index": index, "text": spell(sample.tokens), "finish_reason": sample.reason} for index, sample in enumerate(inference.samples)]
    return {"request": inference.request | {"prompt": spell(inference.prompt_tokens)}, "choices": choices}


def _row(inference: Inference) -> dict[str, Any]:
    target = inference.target
    return {
        "id": inference.id,
        "project": inference.project,
        "trace_id": _identifier(inference.trace_id),
        "parent_id": _identifier(inference.parent_id),
        "episode_id": _identifier(inference.episode_id),
        "session_id": _identifier(inference.session_id),
        "kind": inference.kind,
        "name": inference.kind,
        "model": target.display,
        "deployment_id": target.deployment_id,
        "revision_id": target.revision_id,
        "version": target.weights.version,
        "base_hash": target.base_hash,
        "template_hash": inference.template_hash,
        "status": inference.status,
        "error_code": inference.error_code,
        "started_us": inference.started_us,
        "ttft_us": inference.ttft_us,
        "duration_us": inference.duration_us,
        "in_tokens": inference.in_tokens,
        "out_tokens": inference.out_tokens,
        "cached_tokens": inference.cached_tokens,
        "cost_usd": _cost_usd(inference),
        "finish_reason": inference.samples[0].reason if inference.samples else None,
        "input_hash": None,
        "output_hash": None,
        "body_ref": None,
        "consent": inference.consent,
        "redaction_ver": str(REDACTION_VERSION),
        "seed": inference.seed,
        "config_hash": _digest({key: value for key, value in inference.request.items() if key not in _CONTENT_KEYS}),
        "retention_until_us": inference.started_us + inference.retention_days * _DAY_US,
    }


def _cost_usd(inference: Inference) -> float | None:
    price = inference.target.price
    if price is None:
        return None
    paid = inference.in_tokens - inference.unpaid_tokens
    return price.of(paid, inference.out_tokens, cached_tokens=min(inference.cached_tokens, paid))


def _tokens(inference: Inference) -> dict[str, Any]:
    samples = [
        {
            "tokens": [int(token) for token in sample.tokens],
            "logprobs": [_finite(logprob) for logprob in sample.logprobs],
            "finish_reason": sample.reason,
        }
        for sample in inference.samples
    ]
    return {"prompt": [int(token) for token in inference.prompt_tokens], "samples": samples}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _without_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key != "logprobs"}


def _identifier(value: str | None) -> str | None:
    return None if value is None else pseudonym(value)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(value: Any) -> str:
    return blake3(_canonical(value).encode()).hexdigest()
