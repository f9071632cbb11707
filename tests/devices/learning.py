"""A model of every family learns on a device, and is sampled there with what it published: one JSON line for each.

python -m tests.devices.learning cuda|elsewhere

A process of its own, for the first backward of a process counts the devices that there will ever be.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch

from bloomery.infer.card import measure
from bloomery.infer.versions import Model
from bloomery.models.decoder import Decoder
from bloomery.models.families import FAMILIES
from bloomery.models.kernel_probe import ProbeReport, probe
from bloomery.models.load import load_decoder
from bloomery.train import snapshot
from bloomery.train.run import TrainableRun
from tests.elsewhere import NAME, pretend
from tests.fidelity.instances import asked, learned
from tests.models.builders import saved
from tests.train.builders import run

_STEPS, _MAX_TOKENS, _RANK = 3, 8, 8
_ASKED: Final = slice(7)
"""One text of the two: its prompts have every length."""


class Case(NamedTuple):
    """What is trained."""

    family: str
    dtype: str
    rank: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.family}, {self.dtype}, {f'rank {self.rank}' if self.rank else 'all parameters'}"


CASES: Final = [Case(family, *how) for family in FAMILIES for how in (("float32", 0), ("float32", _RANK), ("bfloat16", _RANK))]


def main(device: str) -> None:
    """Go through all cases."""
    torch.set_num_threads(1)
    if device == NAME:
        pretend()
    with TemporaryDirectory() as directory:
        for family in FAMILIES:
            path, promises = saved(family, Path(directory) / family), dict[str, ProbeReport]()
            for case in (each for each in CASES if each.family == family):
                try:
                    told = _outcome(case, path, torch.device(device), promises)
                except Exception:
                    told = {"error": traceback.format_exc()}
                print(json.dumps({"case": case.name, **told}), flush=True)


def _outcome(case: Case, path: Path, device: torch.device, promises: dict[str, ProbeReport]) -> dict[str, Any]:
    """`promises`: what the probe said of this family, by dtype; it asks for shapes alone."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    base = load_decoder(path, dtype=dtype, device=device)
    trained = run(base, rank=case.rank)
    losses = learned(trained, _STEPS)
    expected = learned(run(load_decoder(path, dtype=dtype), rank=case.rank), _STEPS)
    promised = promises.get(case.dtype) or promises.setdefault(case.dtype, probe(base))
    model = _served(trained, base)
    card = measure(model, model, asked()[_ASKED], _MAX_TOKENS, "exact" if promised.bit_exact else "plain", promised.form)
    numbers = {
        "verdict": card.verdict,
        "k3": card.k3,
        "max_abs": card.max_abs,
        "bit_equal": card.bit_equal,
        "first_difference": card.first_difference,
    }
    return {"losses": losses, "expected": expected, "stale": trained.weights.stale(), "failures": promised.failures, **numbers}


def _served(trained: TrainableRun, base: Decoder) -> Model:
    """From what the run publishes."""
    blob, lora = snapshot.write(trained.weights), trained.spec.lora
    if lora.rank:
        return Model("adapted", base, snapshot.read(blob, base, rank=lora.rank, alpha=lora.alpha))
    return Model("trained", snapshot.read_model(blob, base), None)


def outcomes(lines: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """By the names of their cases, from what was printed."""
    for line in lines.splitlines():
        told = json.loads(line)
        yield told.pop("case"), told


if __name__ == "__main__":
    main(sys.argv[1])
