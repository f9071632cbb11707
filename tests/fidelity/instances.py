"""A small instance of every architecture of the decoder core, trained for some dozens of steps, because random weights hide mismatches."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.train import snapshot
from bloomery.train.run import TrainableRun
from bloomery.types.fidelity import TEXT_TOKENS, Prompt, prompts
from bloomery.types.operations import ForwardBackwardResult
from tests.models.builders import saved
from tests.train.builders import datum, learn, run, step, train

STEPS = 72
MAX_TOKENS = 24
_BATCH, _LENGTH, _RATE = 12, 72, 1.5e-2
_LAG, _FEW, _MANY, _CERTAIN = 3, 16, 64, 0.9


def text(length: int, seed: int) -> NDArray[np.int64]:
    """Half of the texts are learned from positions (a token follows from the one three places before), half from what a token is."""
    noise, rules = np.random.default_rng(seed), np.random.default_rng(0)
    few, many = rules.permutation(_FEW), rules.permutation(_MANY)
    if seed % 2:
        found = noise.integers(0, _FEW, length)
        for place in range(_LAG, length):
            found[place] = few[found[place - _LAG]]
        return found
    found = noise.integers(0, _MANY, length)
    for place in np.flatnonzero(noise.random(length - 1) < _CERTAIN) + 1:
        found[place] = many[found[place - 1]]
    return found + _FEW


def asked() -> list[Prompt]:
    """What the cards of all instances are measured on: texts like those they have learned from."""
    odd, even = (prompts(text(TEXT_TOKENS, 10_000_001 + seed).tolist(), 1024, MAX_TOKENS) for seed in (0, 1))
    return [*odd, *even]


class Instance(NamedTuple):
    """A trained decoder, and how its loss fell."""

    decoder: Decoder
    losses: list[float]
    config: dict[str, Any]

    @property
    def model(self) -> Model:
        """As a sampler and the trainer hold it."""
        return Model("trained", self.decoder, None)


class Adapted(NamedTuple):
    """A trained adapter as it was published, over its base."""

    base: Decoder
    blob: bytes
    rank: int
    alpha: float
    losses: list[float]

    def model(self, alpha: float | None = None) -> Model:
        """With its own scale, or another one."""
        return Model("adapted", self.base, snapshot.read(self.blob, self.base, rank=self.rank, alpha=alpha or self.alpha))


@cache
def trained(family: str, dtype: torch.dtype = torch.float32, steps: int = STEPS, **changes: Any) -> Instance:
    """`changes` are made in the config, and must leave all shapes as they are."""
    base, config = _base(family, dtype, changes)
    training = run(base, rank=0)
    losses = learned(training, steps)
    return Instance(snapshot.read_model(snapshot.write(training.weights), base), losses, config)


@cache
def rounded(family: str) -> Instance:
    """The same in bfloat16: one that is trained so takes four times as long where a processor has no instructions for it."""
    base, config = _base(family, torch.bfloat16, {})
    instance = trained(family)
    base.load_state_dict(instance.decoder.state_dict())
    return Instance(base.requires_grad_(False), instance.losses, config)


@cache
def adapted(family: str) -> Adapted:
    """An adapter on the random base."""
    base, _ = _base(family, torch.float32, {})
    training = run(base, rank=16)
    losses = learned(training, STEPS)
    return Adapted(base, snapshot.write(training.weights), training.spec.lora.rank, training.spec.lora.alpha, losses)


def as_state(decoder: Decoder) -> dict[str, torch.Tensor]:
    """By the names of a Hugging Face directory."""
    return {name: tensor.clone().contiguous() for name, tensor in stored_tensors(decoder).items()}


def learned(training: TrainableRun, steps: int) -> list[float]:
    """The losses of so many steps of the task."""
    losses = []
    for number in range(steps):
        texts = [text(_LENGTH + 1, number * _BATCH + member) for member in range(_BATCH)]
        weights = np.full(_LENGTH, 1 / (_BATCH * _LENGTH))
        result, _ = train(training, [learn(tuple(datum(each[:-1], each[1:], weights=weights) for each in texts)), step(_RATE)])
        assert isinstance(result, ForwardBackwardResult), result
        losses.append(result.metrics["loss:sum"])
    return losses


def _base(family: str, dtype: torch.dtype, changes: dict[str, Any]) -> tuple[Decoder, dict[str, Any]]:
    with TemporaryDirectory() as directory:
        path = saved(family, Path(directory)) / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(config))
        return load_decoder(Path(directory), dtype=dtype), config
