"""What proving weights costs: `python -m bench.verify` prints one JSON line.

A whole model is hashed where it lies, plain and packed, and an adapter where it is fused, each beside a plain read of the same memory (its words
added up by numpy) in the same run, and beside blake3 of the same bytes. Ratios are of GB/s, the median of a few rounds; one thread.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from bench.line import Line, parser_of
from bench.shapes import SHAPES, decoder
from bloomery.models.decoder import Decoder
from bloomery.models.load import stored_tensors
from bloomery.models.packed import pack
from bloomery.models.products import can_pack
from bloomery.models.tensor_bytes import values
from bloomery.sync import live
from bloomery.sync.live import changed
from bloomery.sync.proof import Expected, Proof, prove
from bloomery.sync.state_hash import total

ROUNDS: Final = 5
CHANGED: Final = 100
"""An update changes one element in so many."""


def main() -> None:
    """Measure one model in one dtype."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="150M", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    asked = parser.parse_args()
    line = Line("verify")
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, asked.dtype)
    model = decoder(asked.size).to(dtype)
    known = _as_it_is(model)
    size = sum(tensor.nbytes for tensor in stored_tensors(model).values())
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: [np.frombuffer(_whole(values(tensor)), np.uint64).sum() for tensor in model.parameters()],
        "blake3": lambda: [blake3(values(tensor)).digest() for tensor in model.parameters()],
        "prove": lambda: prove(known, model, None),
    }
    if can_pack(dtype, torch.device("cpu")):
        packed = pack(model)
        ways["prove_packed"] = lambda: prove(known, packed, None)
    seconds = {name: _median_s(way) for name, way in ways.items()}
    figures = {f"{name}_gb_per_s": round(size / each / 1e9, 2) for name, each in seconds.items()}
    ratios = {f"{name}_to_read": round(seconds["read"] / each, 3) for name, each in seconds.items() if name != "read"}
    update, turn = _update_s(model), _turn_s(prove(known, model, None))
    line.tell(
        {"size": asked.size, "dtype": asked.dtype, "bytes": size, **figures, **ratios}
        | {"update_of_1_percent_gb_per_s": round(size / update / 1e9, 1), "scrub_turn_ms": round(turn * 1000, 2)}
    )


def _as_it_is(model: Decoder) -> Expected:
    states = live.tensor_states(live.hash_piece(piece) for piece in live.pieces(model, None))
    return Expected("bench", total(states.values()), states)


def _whole(data: memoryview) -> memoryview:
    return data[: len(data) // 8 * 8]


def _median_s(way: Callable[[], object]) -> float:
    return statistics.median([_s(way) for _ in range(1 + ROUNDS)][1:])


def _s(way: Callable[[], object]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _update_s(model: Decoder) -> float:
    """What knowing the hash after an update takes, of a hundredth of every tensor: the new values are those that were there."""
    parts: Sequence[torch.Tensor] = [tensor.flatten() for tensor in stored_tensors(model).values()]
    indices = [torch.arange(0, len(part), CHANGED) for part in parts]
    old = [part[at] for part, at in zip(parts, indices, strict=True)]
    return _median_s(lambda: [changed(at, each, each) for at, each in zip(indices, old, strict=True)])


def _turn_s(proof: Proof) -> float:
    """One turn of scrubbing, of a 64th."""
    return _median_s(lambda: proof.scrub(proof.numel // 64))


if __name__ == "__main__":
    main()
