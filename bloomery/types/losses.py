"""The losses by name: what each takes beside `target_tokens`, its options, and what it asks of the engine.

Both towers work from this table: the door checks requests against it (`types/checks.py`), the engine computes by it (`train/losses.py`).
Formulas and sources are in `docs/losses.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

TARGETS: Final = "target_tokens"
CLIP_LOW: Final = "clip_low_threshold"
CLIP_HIGH: Final = "clip_high_threshold"
RATIO_MASK: Final = "sequence_ratio_mask"
TEMPERATURE: Final = "temperature"
COLDEST: Final = 0.01
"""Of what is trained: below, hardly anything but the likeliest token comes, and gradients are a hundred times as large."""
HOTTEST: Final = 100.0
"""Beyond, all tokens are about equally likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A number of `loss_fn_config`, from `least` to `most`."""

    default: float
    least: float
    most: float
    per_token: bool = False
    """Whether a datum may say it for each of its tokens, in an input of the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossForm:
    """What one loss takes."""

    factor: str
    """The input that every term is multiplied by: where it is 0 a prediction has no loss and no gradient, whatever else stands there."""
    inputs: tuple[str, ...]
    """Inputs that every datum has, float32 in the shape of its targets; the factor is one of them."""
    masks: tuple[str, ...] = ()
    """Inputs that a datum may leave out: then they are 1 where the factor is not 0."""
    options: Mapping[str, Option] = field(default_factory=lambda: _options())
    soft_targets: bool = False
    """Whether each position may have several targets."""
    exact: bool = True
    """Whether log-probabilities are compared with sampled ones: then attention pads its keys as a cached step of the sampler does."""
    term_output: str | None = None
    """Name under which the terms are returned per token."""
    notice: str | None = None
    """What a client should know who uses it."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Inputs that a datum may have."""
        return (*self.masks, *(name for name, option in self.options.items() if option.per_token))


def _options(**own: Option) -> dict[str, Option]:
    """And what all have: of the distribution whose log-probabilities are computed."""
    return {**own, TEMPERATURE: Option(default=1.0, least=COLDEST, most=HOTTEST)}


_SAMPLED: Final = ("logprobs", "advantages")
_MOST: Final = 1e6
"""Of any option: beyond, float32 has few digits left for the log-probabilities."""


def _low(default: float) -> Option:
    return Option(default=default, least=0.0, most=1.0, per_token=True)


def _high(default: float) -> Option:
    return Option(default=default, least=1.0, most=_MOST, per_token=True)


def _clip(low: float, high: float) -> dict[str, Option]:
    return {CLIP_LOW: _low(low), CLIP_HIGH: _high(high)}


def _mask(default: float) -> Option:
    return Option(default=default, least=0.0, most=1.0)


def _coefficient(default: float) -> Option:
    return Option(default=default, least=0.0, most=_MOST)


LOSSES: Final[Mapping[str, LossForm]] = MappingProxyType(
    {
        "cross_entropy": LossForm(factor="weights", inputs=("weights",), soft_targets=True, exact=False, term_output="elementwise_loss"),
        "importance_sampling": LossForm(factor="advantages", inputs=_SAMPLED),
        "ppo": LossForm(factor="advantages", inputs=_SAMPLED, options=_options(**_clip(0.8, 1.2))),
        "cispo": LossForm(factor="advantages", inputs=_SAMPLED, options=_options(**_clip(0.0, 4.0))),
        "dro": LossForm(factor="advantages", inputs=_SAMPLED, options=_options(beta=_coefficient(0.05))),
        "gspo": LossForm(factor="advantages", inputs=_SAMPLED, masks=(RATIO_MASK,), options=_options(**_clip(1 - 3e-4, 1 + 4e-4))),
        "stable_reinforce": LossForm(
            factor="advantages",
            inputs=_SAMPLED,
            options=_options(**{CLIP_HIGH: _high(1.0), "kl_coeff": _coefficient(0.01)}),
            notice=(
                "stable_reinforce has no public definition; this server computes its own: truncated importance weights and a quadratic pull towards"
                " the sampler (docs/losses.md). Provenance spans are checked and not needed."
            ),
        ),
        "dapo": LossForm(
            factor="advantages",
            inputs=_SAMPLED,
            options=_options(**_clip(0.8, 1.28), dual_clip_threshold=Option(default=10.0, least=1.0, most=_MOST)),
        ),
        "dppo": LossForm(
            factor="advantages",
            inputs=_SAMPLED,
            options=_options(mask_low_threshold=_mask(0.2), mask_high_threshold=_mask(0.2)),
        ),
        "reinforce": LossForm(factor="advantages", inputs=_SAMPLED),
    }
)
CUSTOM: Final = "custom"
"""A loss that comes with its operation (`types/custom_loss.py`)."""
