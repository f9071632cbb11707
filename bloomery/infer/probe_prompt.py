"""The prompt that a sampler answers before it serves anybody, and what the trainer's forward of the same weights says of it.

Bits are equal where the machine promises them; elsewhere both are within `TOLERANCE_K3`, which is one for sampled tokens alone. Where bits differ and
the tolerance holds, the sampler serves without the promise.
"""

import logging
from typing import Final, NamedTuple

import numpy as np

from bloomery.infer.fidelity import trainer_logprobs
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.types.arrays import Array
from bloomery.types.errors import Corrupt
from bloomery.types.fidelity import PLAIN_K3, Sampled, answers, compare
from bloomery.types.generation import Generate, PromptScored, SamplerEvent, SamplingParams, Weights

log = logging.getLogger(__name__)

TOLERANCE_K3: Final = 10 * PLAIN_K3
"""Of so few tokens; that of cards is for hundreds, and would now and then refuse what is only rounded. Other weights give many times as much."""
_PROMPT_TOKENS: Final = 24
"""On both sides of the pads of rows."""
_TOKENS: Final = 8
_PROBE: Final = "probe"
_STEPS: Final = 1000
"""The probe is alone: a sampler that has not answered by then never will."""


class Probed(NamedTuple):
    """How the probe prompt was answered."""

    tokens: int
    max_abs: float
    """Largest difference to the trainer's log-probabilities, in nats."""
    bit_equal: bool


def ask_probe(sampler: Sampler, model: Model, *, exact: bool) -> Probed:
    """Ask the sampler before it serves anybody; Corrupt where it does not answer as the trainer would."""
    config = model.decoder.config
    prompt = tuple((7 * place + 3) % config.vocab_size for place in range(max(1, min(_PROMPT_TOKENS, config.context - _TOKENS))))
    asked = Generate(
        request_id=_PROBE,
        weights=Weights(version=model.version),
        prompt=Array.of(np.array(prompt, np.int32)),
        params=SamplingParams(max_tokens=_TOKENS, seed=0),
        prompt_logprobs=True,
    )
    events = _answer(sampler, asked)
    (sampled,) = answers(asked, events)
    scored = next(event for event in events if isinstance(event, PromptScored))
    behind_first = np.concatenate([scored.logprobs.numpy()[1:], sampled.logprobs.numpy()])
    everything = Sampled(tokens=sampled.tokens, logprobs=Array.of(behind_first))
    trainers = trainer_logprobs(model, [everything])
    all_tokens, own_tokens = compare([everything], trainers), compare([sampled], [trainers[0][-sampled.logprobs.shape[0] :]])
    if own_tokens.k3 > TOLERANCE_K3:
        raise Corrupt(
            f"the sampler does not answer the probe prompt as the trainer would: k3 {own_tokens.k3:.3g}, where rounding gives at most "
            f"{TOLERANCE_K3:g}; nothing is served. Run `bloomery fidelity` to find where they part"
        )
    if exact and all_tokens.max_abs > 0:
        log.error("not bit-exact here: the probe prompt was answered up to %.3g nats apart from the trainer", all_tokens.max_abs)
    return Probed(all_tokens.tokens, all_tokens.max_abs, all_tokens.max_abs == 0)


def _answer(sampler: Sampler, asked: Generate) -> list[SamplerEvent]:
    events: list[SamplerEvent] = []
    sampler.submit(asked)
    for _ in range(_STEPS):
        if not sampler.busy:
            break
        events += sampler.step()
    # Nothing of it is left for those who come.
    sampler.forget_all()
    sampler.reset_prefix_cache()
    return events
