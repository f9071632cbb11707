"""Both sides of the probe, of weights in this process, and the probation of versions: no request gets one before it has answered.

A sampler answers by its own forward: prefill of a pad of rows and a decode step, through packed matrices where it has them, beside the sampler
that serves, so that no step waits. What lives in that one alone (its cache, stacked factors of those that are together in a batch) takes no part.
Who answers stays from one version to the next, and computes the decode step as one that serves does: by a program that is moved to new weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Final

import numpy as np
import torch

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.fidelity import packed_hidden, packed_logprobs
from bloomery.infer.plan import Sample, Stem
from bloomery.infer.runner import Feed, Runner
from bloomery.infer.scoring import Question
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.pads import packed_starts
from bloomery.models.rests import rest
from bloomery.types.errors import Corrupt
from bloomery.types.generation import SamplingParams
from bloomery.types.probe import PREFILLED, Floats, ProbeAnswer, Sides, judge, logprob_bytes, logprobs_of, probe_tokens, rounding

MOST_ROUNDING_RMS: Final = 0.5
"""In nats: of tokens that a model finds absurd half precision rounds by a tenth."""
_REMEMBERED: Final = 256
"""Versions whose answers are remembered, for those that are trained from them."""


class Probation:
    """Asks every version of one base; from any thread."""

    def __init__(
        self,
        base: Model,
        form: Form,
        computed_with: Callable[[Decoder], Decoder],
        *,
        exact: bool,
        numerics: str = "",
        told: ProbeAnswer | None = None,
    ) -> None:
        """`told`: the trainer's side of the base, where somebody left it. `exact`: under equal `numerics` both sides have equal bits."""
        self._exact, self._numerics = exact, numerics
        self._answerer = partial(Answerer, base.decoder, form, computed_with)
        self._idle: list[Answerer] = []
        """Whoever asks takes one, or has one made where others are asking."""
        self._tokens = probe_tokens(base.decoder.config.vocab_size, base.decoder.config.context)
        self._lock = Lock()
        self._remembered: OrderedDict[str, Sides] = OrderedDict()
        self.base = self._ask(base, self._usable(told))
        _refuse_far_apart(self.base)
        self._noise = rounding(self.base, str(base.decoder.dtype).removeprefix("torch."))

    def examine(self, model: Model) -> Model:
        """The model with its answer; Corrupt where it is not the trainer's. Of weights that nobody proved, and the bare base, nothing is asked."""
        if model.proof is None:
            return model
        told = self._usable(model.told)
        asked, before = self._ask(model, told), self._before(model)
        probed = judge(asked, before, exact=self._exact, noise=self._noise, expected="here" if told is None else "published")
        with self._lock:
            self._remembered[model.version] = asked
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return model._replace(probed=probed)

    def answer(self, name: str) -> ProbeAnswer:
        """The trainer's side of the base, for others that hold it under this name."""
        logprobs = logprob_bytes(self.base.trainer)
        return ProbeAnswer(version=name, parent="", numerics=self._numerics, tokens=self._tokens, logprobs=logprobs)

    def _ask(self, model: Model, told: ProbeAnswer | None) -> Sides:
        trainer = trainer_side(model, self._tokens) if told is None else logprobs_of(told)
        return Sides(model.version, self._sampler_side(model), trainer)

    def _sampler_side(self, model: Model) -> Floats:
        with self._lock:
            answerer = self._idle.pop() if self._idle else self._answerer()
        found = answerer.ask(model, self._tokens)
        # One that broke does not come back.
        with self._lock:
            self._idle.append(answerer)
        return found

    def _usable(self, told: ProbeAnswer | None) -> ProbeAnswer | None:
        """What was told by the same numerics, of the same tokens. Of another machine's, or an earlier release's, nobody knows what is rounding."""
        return told if told is not None and (told.tokens, told.numerics) == (self._tokens, self._numerics) else None

    def _before(self, model: Model) -> Sides:
        with self._lock:
            return self.base if model.told is None else self._remembered.get(model.told.parent, self.base)


def _refuse_far_apart(base: Sides) -> None:
    """What both sides differ by under the base is taken for rounding from here on."""
    difference = base.sampler.astype(np.float64) - base.trainer
    if not (np.square(difference).mean() <= MOST_ROUNDING_RMS**2):
        raise Corrupt(
            f"under the base model {base.version} the sampler and the trainer are up to {np.abs(difference).max():.3g} nats apart, "
            f"which is no rounding: run `bloomery fidelity` to find where they part, or delete its document under probes/ in the data directory"
        )


class Answerer:
    """The sampler's side: a cache and a runner for one sequence of one version after the other, all with the form of `decoder`."""

    def __init__(self, decoder: Decoder, form: Form, computed_with: Callable[[Decoder], Decoder]) -> None:
        self._cache = KeyValueCache(decoder.config, dtype=decoder.dtype, device=decoder.device)
        self._runner = Runner(self._cache, form, computed_with)

    @torch.inference_mode()
    def ask(self, model: Model, tokens: tuple[int, ...]) -> Floats:
        """Log-probabilities [N - 1] as a sampler computes them."""
        rest()
        sample = Sample("probe", 0, Stem(model.version, np.array(tokens, np.int32)), len(tokens), reusable=0)
        self._cache.place(sample)
        prompt = Feed(sample, model, tokens[: min(PREFILLED, len(tokens) - 1)], 0, wanted=0)
        none = np.zeros(0, np.int64)
        question = Question(0, np.array(tokens[1 : prompt.stop + 1]), 0, none, none, 0, SamplingParams(max_tokens=0, seed=0))
        (hidden,) = self._runner.prefill([prompt])
        rest()
        found = [self._runner.score(hidden, prompt, question).logprobs_T]
        for place in range(prompt.stop, len(tokens) - 1):
            rest()
            after = self._runner.decode([Feed(sample, model, tokens[place : place + 1], place)])
            found.append(after.logprobs(torch.tensor(tokens[place + 1 : place + 2])).numpy())
        self._cache.release(sample)
        return np.concatenate(found).astype(np.float32)


@torch.inference_mode()
def trainer_side(model: Model, tokens: tuple[int, ...]) -> Floats:
    """The same as a training pass computes them."""
    rest()
    hidden_RD = packed_hidden(model, [tokens])
    rest()
    logprobs_R1 = packed_logprobs(model, [tokens], hidden_RD, packed_starts([len(tokens)]))
    found: Floats = logprobs_R1[: len(tokens) - 1, 0].cpu().numpy()
    return found
