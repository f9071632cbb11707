"""Both sides of the benchmark of supervised training train the same batches, and each of the peer's forms is one of its own."""

import json
from pathlib import Path

import pytest

from bench import sft
from bench.shapes import EMPTY, write_directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_our_side_learns_the_batches_alike_in_both_number_formats(tmp_path: Path, kind: str) -> None:
    model = write_directory(EMPTY, tmp_path / "model")
    batch = sft.random_batches(EMPTY.vocab_size, 1)
    job = {"model": str(model), "batches": batch * 4, "lora": kind == "lora", "threads": 1, "learning_rate": 1e-2, "device": "cpu"}
    exact, rounded = (sft.train_ours(job | {"dtype": dtype})["losses"] for dtype in ("float32", "bfloat16"))
    assert exact[3] < exact[0] - 0.05
    assert rounded == pytest.approx(exact, abs=0.05)


def test_the_peer_runs_every_packing_in_every_number_format() -> None:
    for dtype, forms in (("float32", 3), ("bfloat16", 6)):
        found = sft.peer_forms(dtype, steps=8)
        assert len({json.dumps(arguments, sort_keys=True) for arguments in found.values()}) == len(found) == forms
    assert sft.peer_forms("bfloat16", 8)["wrapped_weights"]["model_init_kwargs"] == {"dtype": "bfloat16"}
