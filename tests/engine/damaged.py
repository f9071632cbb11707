"""An engine process with a fault planted in it: `python -m tests.engine.damaged FAULT CONFIG.json`.

A fault is planted where it would happen, and never in what checks.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from bloomery.engine import __main__ as program
from bloomery.engine import executor
from bloomery.engine.executor import Executor
from bloomery.infer import runner
from bloomery.models.decoder import Decoder
from tests import elsewhere


def flip(tensor: Tensor) -> None:
    """One bit of one number, the least."""
    tensor.data.view(torch.int32)[3] ^= 1


def loading() -> None:
    """What was read from the files is not what arrives."""
    load = executor.load_decoder

    def flipped(*args: Any, **options: Any) -> Decoder:
        decoder = load(*args, **options)
        flip(decoder.norm)
        return decoder

    executor.load_decoder = flipped


def sampling() -> None:
    """The sampler draws at another temperature than it was asked for, and says the log-probabilities of that."""
    found = runner._next_tokens
    runner._next_tokens = lambda logits_RV, rows_B, temperatures_B: found(20 * logits_RV, rows_B, temperatures_B)


def memory() -> None:
    """A number of the base changes at SIGUSR1. All of it is then looked at as fast as can be, which otherwise takes a minute."""
    begin, held = Executor.__init__, []

    def noted(self: Executor, *args: Any) -> None:
        begin(self, *args)
        held.append(self)

    def damage(*_: object) -> None:
        (own,) = held
        flip(own._decoder.norm)
        own._scrub._every_s, own._scrub._due_s = 0.001, 0.0

    Executor.__init__ = noted  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, damage)


FAULTS: Final[dict[str, Callable[[], None]]] = {fault.__name__: fault for fault in (loading, sampling, memory)}

if __name__ == "__main__":
    if os.environ.get("BLOOMERY_TEST_DEVICE") == elsewhere.NAME:
        elsewhere.pretend()
    FAULTS[sys.argv.pop(1)]()
    program.main()
