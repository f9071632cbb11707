"""Both sides of the benchmark of steps on a device train the same batches, however the peer arranges them."""

from pathlib import Path

import pytest

from bench import sft, steps
from bench.shapes import EMPTY, write_directory

JOB = {"lora": False, "dtype": "float32", "learning_rate": 1e-2, "device": "cpu"}


def test_our_side_and_both_forms_of_the_peer_have_the_same_losses(tmp_path: Path) -> None:
    job = JOB | {"model": str(write_directory(EMPTY, tmp_path / "model"))}
    batches = sft.random_batches(EMPTY.vocab_size, 2, 3, (8, 24))
    forms = (sft.Trainer(job | {"micro_batch_tokens": 16}), steps.Peer(job, steps.padded), steps.Peer(job, steps.packed))
    ours, padded, packed = ([form.step(batch) for batch in batches] for form in forms)
    assert ours[1] != pytest.approx(ours[0], abs=0.01)
    assert padded == pytest.approx(ours, abs=1e-4)
    assert packed == pytest.approx(ours, abs=1e-4)
