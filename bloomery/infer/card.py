"""A fidelity card of weights in memory, from what a sampler has answered with them."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bloomery.infer.fidelity import sample, trainer_logprobs
from bloomery.infer.taps import first_difference
from bloomery.infer.versions import Model
from bloomery.models.form import Form
from bloomery.models.numerics import numerics_id
from bloomery.types.fidelity import Mode, Prompt, Sampled, compare, verdict
from bloomery.types.ids import now_us
from bloomery.types.resources import Fidelity

TRAINERS: Final = Form()
"""The form of a training pass."""
NOT_HERE: Final = "nowhere while the request is alone and in the trainer's process: the sampler that answered differs in weights, numerics or company"


def measure(trainer: Model, sampler: Model, prompts: Sequence[Prompt], max_tokens: int, mode: Mode, form: Form = TRAINERS) -> Fidelity:
    """Have a sampler in this process answer, in some form, and make the card."""
    sampled = sample(sampler, prompts, max_tokens, form)
    return card(trainer, sampler, sampled, trainer_logprobs(trainer, sampled), mode, form)


def card(
    trainer: Model, sampler: Model, sampled: Sequence[Sampled], logprobs: Sequence[NDArray[np.float32]], mode: Mode, form: Form = TRAINERS
) -> Fidelity:
    """Of some answers and the trainer's log-probabilities of them; where it fails, `sampler` samples again to find the place."""
    numbers = compare(sampled, logprobs)
    said = verdict(numbers, mode)
    first = None
    if said == "fail":
        worst = sampled[numbers.worst]
        first = str(first_difference(trainer, sampler, Prompt(worst.prompt, 1, 0, late=False), worst.logprobs.shape[0], form) or NOT_HERE)
    return Fidelity(
        mode=mode,
        verdict=said,
        k3=numbers.k3,
        mean_abs=numbers.mean_abs,
        max_abs=numbers.max_abs,
        bit_equal=numbers.bit_equal,
        sequences=numbers.sequences,
        tokens=numbers.tokens,
        first_difference=first,
        dtype=str(trainer.decoder.dtype).removeprefix("torch."),
        numerics=numerics_id(trainer.decoder.dtype, trainer.decoder.device),
        measured_us=now_us(),
    )
