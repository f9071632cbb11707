"""Whether tokens to train on are what they say: their log-probabilities, once more, under the weights that each of them names.

`check_served` has the server score them before they are trained on, each by its own version: numbers, ids or versions that changed between sampler
and trainer do not fit together any more. `check_on_policy` says the same of the trainer's forward, from the metrics of an update whose tokens are all
of the weights that it began with, and costs nothing: `Policy` holds such an update to the same numbers before it is taken over. Both raise
Corrupt, with the version.

With d = recomputed - served and r = exp(d), k3 is the mean of r - 1 - d. A bias may be too small for k3 and still add up: 0.012 nats a token are
k3 7e-5, and a factor of 3.3 after 100 tokens. But r has the mean 1 wherever tokens were drawn from the distribution that was served, so a mean
beyond chance off 1 is refused too.

None of this sees tokens that were drawn from another distribution than that of the log-probabilities beside them, such as the model's own beside
tokens of another temperature: the ratio is 1 then, and wrong. `check_drawn` counts how often the likeliest token came. Shapes: S sampled tokens of a
sequence.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bloomery.client import Sampler
from bloomery.client.sampling import Scored
from bloomery.types.errors import Corrupt
from bloomery.types.fidelity import PLAIN_K3, Mode
from bloomery.types.resources import Status

Numbers = NDArray[np.float64]
Held = Literal["off", "promised", "always"]
"""Whether a loop refuses updates whose numbers are not those of its rollouts: never, where the server promises bits, or also elsewhere, by bars."""

BIAS: Final = 1e-3
"""How far the mean ratio of a plain sampler may be off 1, beyond chance: 10 % over 100 tokens."""
_CHANCE: Final = 6.0
"""Standard errors."""


class Served(Protocol):
    """A sequence of tokens with what was served of those [S] that were sampled."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them, those of prompts too."""

    @property
    def places(self) -> tuple[int, ...]:
        """Where the sampled ones are."""

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each, in the distribution that it was drawn from."""

    @property
    def versions(self) -> tuple[str, ...]:
        """The weights of each."""

    @property
    def temperature(self) -> float:
        """At which they were drawn."""


class Agreement(NamedTuple):
    """What was served beside what was computed anew, of the tokens of one version."""

    tokens: int
    k3: float
    ratio: float
    """The mean of r."""
    largest: float
    """Largest difference, in nats."""
    where: str = ""
    """The token that has it."""

    @property
    def error(self) -> float:
        """Standard error of the mean ratio: for small d, twice k3 is the mean of (r - 1)**2."""
        return math.sqrt(2 * self.k3 / self.tokens)


class Recomputed(NamedTuple):
    """Of the sampled tokens of a sequence [S], under the weights that each names and at its temperature."""

    logprobs: Numbers
    likeliest: Numbers
    """The log-probabilities of the likeliest tokens at those places."""
    came: NDArray[np.bool_]
    """Whether those are the ones that were sampled."""


def check_served(sequences: Sequence[Served], sampler_of: Callable[[str], Sampler], mode: Mode, *, timeout_s: float = 120.0) -> dict[str, Agreement]:
    """By version; `sampler_of` gives the sampler of one, such as `client.sampler`. Corrupt where the two disagree."""
    for number, sequence in enumerate(sequences):
        check_whole(number, sequence)
    found = compare(sequences, recompute(sequences, sampler_of, timeout_s))
    for version, agreement in found.items():
        require(agreement, version, mode)
    return found


def check_on_policy(trained: Mapping[str, float], version: str, mode: Mode) -> None:
    """`trained` are the metrics of an update all of whose tokens are of `version`, the weights that it began with; empty ones say nothing."""
    if trained.get("tokens:sum"):
        require(of_metrics(trained), version, mode)


def of_metrics(trained: Mapping[str, float]) -> Agreement:
    """What the metrics of gradients say of all tokens."""
    tokens = int(trained.get("tokens:sum", 0))
    if not tokens or "k3:sum" not in trained:
        return Agreement(0, 0.0, 1.0, 0.0)
    return Agreement(tokens, trained["k3:sum"] / tokens, trained["ratio:sum"] / tokens, trained["logprob_diff:max"])


def promises_bits(status: Status, base_model: str) -> bool | None:
    """Whether whoever samples the rollouts of a base model has the bits of its trainer: all of them bit-exact, with the same numerics.

    None while its engine is away, and says nothing of itself.
    """
    engines = [engine for engine in status.engines if base_model in engine.aliases]
    if any("numerics" not in engine.detail for engine in engines):
        return None
    bases = {engine.base_hash for engine in engines}
    sampling = [replica.detail for replica in status.replicas if replica.serves == "rollouts" and replica.base_hash in bases]
    # A replica that is away has not answered either.
    known = [told for told in (*(engine.detail for engine in engines), *sampling) if "numerics" in told]
    return len({told["numerics"] for told in known}) == 1 and all(told["bit_exact"] for told in known)


def check_drawn(likeliest: Collection[float], came: Collection[bool], version: str) -> float:
    """How often the likeliest token came, in standard errors beyond what is expected; Corrupt where that is no chance.

    `likeliest` are the log-probabilities of the likeliest tokens at the places of sampled ones, of the weights that sampled and at the temperature
    that is said of them; `came` whether those are the ones that were sampled. The deviation grows with the root of their number: a thousand show that
    a temperature was 0.7 and not 1, and hardly one of 0.9.
    """
    p, times = np.exp(np.asarray([*likeliest], dtype=np.float64)), sum(came)
    variance = float((p * (1 - p)).sum())
    deviation = (times - float(p.sum())) / math.sqrt(variance) if variance else 0.0
    if abs(deviation) > _CHANCE:
        counts = f"{times} times of {len(p)}, and {p.sum():.0f} times were to be expected"
        raise Corrupt(
            f"tokens of version `{version}` were not drawn from its distribution: the likeliest one came {counts}; look for a temperature, a "
            "truncation or a bias that the log-probabilities served do not have"
        )
    return deviation


def check_whole(number: int, sequence: Served) -> None:
    """A finite log-probability and a version for each sampled token: otherwise something behind the server made these tokens, or numbers."""
    sampled, logprobs, versions = len(sequence.places), len(sequence.logprobs), len(sequence.versions)
    if not sampled == logprobs == versions:
        has = f"{sampled} sampled tokens, {logprobs} log-probabilities and {versions} versions"
        raise Corrupt(f"sequence {number} has {has}: it was not served like that; train on the ids of an answer, never on its text")
    for place, logprob, version in zip(sequence.places, sequence.logprobs, sequence.versions, strict=True):
        if not math.isfinite(logprob):
            raise Corrupt(f"{_at(number, place)}, of version `{version}`, has the log-probability {logprob}: nothing can be learnt from it")


def recompute(sequences: Sequence[Served], sampler_of: Callable[[str], Sampler], timeout_s: float) -> list[Numbers]:
    """The log-probabilities [S] of each sequence's sampled tokens, each under the version that it names."""
    return [each.logprobs for each in score(sequences, sampler_of, timeout_s)]


def score(sequences: Sequence[Served], sampler_of: Callable[[str], Sampler], timeout_s: float) -> list[Recomputed]:
    """The same with the likeliest tokens: one prefill of each sequence for each of its versions."""
    samplers = {version: sampler_of(version) for version in sorted({version for sequence in sequences for version in sequence.versions})}
    asked = [
        {
            version: samplers[version].score(sequence.tokens, likeliest=True, temperature=sequence.temperature)
            for version in sorted(set(sequence.versions))
        }
        for sequence in sequences
    ]
    scored = [{version: pending.scored(timeout_s) for version, pending in each.items()} for each in asked]
    return [_recomputed(sequence, of) for sequence, of in zip(sequences, scored, strict=True)]


def _recomputed(sequence: Served, scored: Mapping[str, Scored]) -> Recomputed:
    places = list(zip(sequence.places, sequence.versions, strict=True))
    likeliest = [scored[version].likeliest[place] for place, version in places]
    return Recomputed(
        np.array([scored[version].logprobs[place] for place, version in places]),
        np.array([each.logprob for each in likeliest]),
        np.array([each.token == sequence.tokens[place] for each, place in zip(likeliest, sequence.places, strict=True)], dtype=np.bool_),
    )


def compare(sequences: Sequence[Served], recomputed: Sequence[Numbers]) -> dict[str, Agreement]:
    """Of all tokens of each version."""
    differences: dict[str, list[tuple[float, str]]] = {}
    for number, (sequence, again) in enumerate(zip(sequences, recomputed, strict=True)):
        for place, version, served, now in zip(sequence.places, sequence.versions, sequence.logprobs, again, strict=True):
            differences.setdefault(version, []).append((float(now) - served, _at(number, place)))
    return {version: _agreement(found) for version, found in differences.items()}


def _agreement(found: Sequence[tuple[float, str]]) -> Agreement:
    d = np.array([difference for difference, _ in found])
    worst = int(np.argmax(np.abs(d)))
    # Bounded, so that a mean is always a number.
    bounded = np.minimum(d, 100.0)
    return Agreement(len(d), k3(bounded), float(np.mean(np.exp(bounded))), float(np.abs(d[worst])), found[worst][1])


def _at(number: int, place: int) -> str:
    return f"token {place} of sequence {number}"


def k3(d_N: Numbers) -> float:
    """The mean of exp(d) - 1 - d in nats a token, d being another log-probability less that which N tokens were drawn with: the mean of -d is the
    divergence of the two distributions, and so is that of this, which is never negative."""
    return float(np.mean(np.expm1(d_N) - d_N))


def agrees(agreement: Agreement, mode: Mode) -> bool:
    """Exact means equal bits; plain that k3 and the mean ratio are those of rounding."""
    if mode == "exact":
        return agreement.largest == 0
    return agreement.k3 <= PLAIN_K3 and abs(agreement.ratio - 1) <= BIAS + _CHANCE * agreement.error


def require(agreement: Agreement, version: str, mode: Mode) -> None:
    """Corrupt where they do not agree."""
    if agrees(agreement, mode):
        return
    worst = f"{agreement.largest:.3g} nats at most" + (f", at {agreement.where}" if agreement.where else "")
    numbers = f"k3 {agreement.k3:.3g}, mean ratio {agreement.ratio:.6g} over {agreement.tokens} tokens, {worst}"
    raise Corrupt(
        f"version `{version}` gives other log-probabilities than were served with its tokens: {numbers}. Something between sampler and trainer "
        "changes weights, tokens, versions, temperature or truncation; `bloomery fidelity` tells whether it is the model"
    )
