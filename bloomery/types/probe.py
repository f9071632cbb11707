"""The probe of a version: a few fixed tokens, what the trainer's forward says of them and what a sampler does, and whether both moved alike.

The trainer's side is stored beside the manifest when a version is published, and not in it: it depends on the numerics of who computed it. A sampler
that has loaded the version says its side, and `judge` compares. Where bits are promised the two are equal, or the version is refused. Elsewhere there
are bars: for what they differ by under the version, and for how far each has moved since weights that the same sampler was asked with before, because
small steps move a log-probability by less than rounding may. Everything is in nats; N tokens, the first of which is given.
"""

import math
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

Floats = NDArray[np.float32]

PREFILLED: Final = 16
"""One pad of rows; what is behind them is fed to decode steps."""
_TOKENS: Final = PREFILLED + 2
"""The last of them is only asked about, so that one decode step is enough, which is what an answer costs most of."""
LARGEST_RMS: Final = 0.15
"""Between the two sides of a version: k3 0.01, as for the probe prompt of a process."""
MARGIN: Final = 4.0
"""So many times what the two sides differ by under the base is still rounding."""
OFF: Final = 0.5
"""By more than this share of what the trainer moved nobody is off who computes with the same weights; one who leaves them out is off by all of it."""
ROUNDING: Final = {"float32": 4e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""What two orders of the same sums differ by at least, where bits are not promised (docs/fidelity.md)."""


class ProbeAnswer(Wire, frozen=True):
    """The trainer's side of one version, as it is stored."""

    version: str
    parent: str
    """The version that these weights were trained from."""
    numerics: str
    """Equal bits are promised under the same id."""
    tokens: tuple[int, ...]
    logprobs: bytes
    """Of every token but the first, float32, little-endian."""

    def to_json(self) -> bytes:
        """The document."""
        return msgspec.json.encode(self)


class TrainerSide(NamedTuple):
    """What a trainer hands over of the weights that it publishes."""

    tokens: tuple[int, ...]
    logprobs: bytes


class Probed(Wire, frozen=True):
    """How a sampler answered the probe of one version, before anybody else was answered with it."""

    expected: Literal["published", "here"]
    """Where the trainer's side was computed: where the version was published, or in this process, with the weights that it had loaded."""
    tokens: int
    max_abs: float
    """Largest difference between both sides."""
    bit_equal: bool
    against: str
    """The version from which both sides have moved: the parent where it was asked here, else the base."""
    predicted: float
    """How far the trainer's side moved, root mean square."""
    moved: float
    """How far the sampler's did."""
    tells: bool
    """Whether the trainer's side moved by more than rounding, so that a sampler that stands still would have been refused."""


class ProvedVersion(Wire, frozen=True):
    """What a process has proved of a version that it has in memory."""

    root: str
    """State hash of its live tensors: that of its manifest."""
    probe: Probed | None = None
    """None where the process asks versions nothing."""


class Sides(NamedTuple):
    """Log-probabilities [N - 1] of the probe under one version."""

    version: str
    sampler: Floats
    trainer: Floats


def probe_key(name: str) -> str:
    """Where the trainer's side of a version lies; of a base the name says the dtype too (`base_name`)."""
    return f"probes/{name}.json"


def base_name(base_hash: str, dtype: str) -> str:
    """What a base is called that is computed in a dtype."""
    return f"{base_hash}-{dtype}"


def probe_tokens(vocab_size: int, context: int) -> tuple[int, ...]:
    """The same of all versions of a base, so that answers can be compared."""
    return tuple((7 * place + 3) % vocab_size for place in range(min(_TOKENS, context)))


def read_answer(data: bytes, version: str) -> ProbeAnswer:
    """What was stored of a version; Corrupt where it is damaged, or another's."""
    advice = "delete it, and who loads the version computes it anew"
    try:
        answer = msgspec.json.decode(data, type=ProbeAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the probe of version {version} is damaged: {error}; {advice}") from error
    if answer.version != version or len(answer.logprobs) != 4 * (len(answer.tokens) - 1):
        raise Corrupt(f"the probe of version {version} is one of version {answer.version}, or cut off; {advice}")
    return answer


def rounding(base: Sides, dtype: str) -> float:
    """What both sides of a version may differ by (root mean square) where bits are not promised, before `MARGIN`.

    It is measured under the base alone, where no adapter can be amiss: what a version that was served was off by would otherwise excuse the next one.
    """
    return max(_rms(base.sampler - base.trainer), ROUNDING[dtype])


def judge(asked: Sides, before: Sides, *, exact: bool, noise: float, expected: Literal["published", "here"]) -> Probed:
    """How it went; Corrupt where a sampler does not compute with the weights that were trained.

    `exact`: equal bits were promised to these sides. `noise`: the `rounding` of the base that both belong to.
    """
    if not (np.isfinite(asked.sampler).all() and np.isfinite(asked.trainer).all()):
        raise Corrupt(f"version {asked.version} gives no finite log-probabilities: train it again from an earlier checkpoint")
    apart = asked.sampler - asked.trainer
    if _rms(apart) > max(LARGEST_RMS, MARGIN * noise):
        raise Corrupt(
            f"version {asked.version} is not served: the sampler does not answer its probe as its trainer does, but {_rms(apart):.3g} nats apart "
            f"(root mean square of {len(apart)} tokens). Run `bloomery fidelity` to find where they part"
        )
    predicted, moved = asked.trainer - before.trainer, asked.sampler - before.sampler
    stands_still = exact and bool(predicted.any()) and not moved.any()
    if stands_still or _rms(moved - predicted) > max(OFF * _rms(predicted), MARGIN * noise):
        raise Corrupt(
            f"version {asked.version} is not served: since version {before.version} its trainer's log-probabilities of the probe have moved by "
            f"{_rms(predicted):.3g} nats, and the sampler's by {_rms(moved):.3g}, {_rms(moved - predicted):.3g} away from there (root mean squares): "
            f"the sampler does not compute with what was trained. Run `bloomery fidelity` to find where they part"
        )
    if exact and apart.any():
        raise Corrupt(
            f"version {asked.version} is not served: equal bits are promised here, and the sampler answers its probe up to "
            f"{np.abs(apart).max():.3g} nats apart from its trainer. Run `bloomery fidelity` to find where they part; where that is rounding, "
            f"`bloomery up --plain` serves without the promise"
        )
    return Probed(
        expected=expected,
        tokens=len(apart),
        max_abs=float(np.abs(apart).max()),
        bit_equal=not apart.any(),
        against=before.version,
        predicted=_rms(predicted),
        moved=_rms(moved),
        tells=_rms(predicted) > MARGIN * noise or (exact and bool(predicted.any())),
    )


def logprobs_of(answer: ProbeAnswer) -> Floats:
    """As numbers."""
    return np.frombuffer(answer.logprobs, "<f4").astype(np.float32)


def logprob_bytes(logprobs: NDArray[Any]) -> bytes:
    """As they are stored."""
    return logprobs.astype("<f4").tobytes()


def _rms(values: NDArray[Any]) -> float:
    wide = values.astype(np.float64)
    return math.sqrt(float(np.mean(wide * wide)))
