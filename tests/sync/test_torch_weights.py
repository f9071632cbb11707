"""A trainer and a sampler of somebody's own, whose weights are tensors of torch, through a chain."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bloomery.store.objects import Folder
from bloomery.sync.chain.publisher import Publisher
from bloomery.sync.chain.receiver import Receiver
from bloomery.sync.torch_weights import TorchWeights
from bloomery.types.errors import NotSupported


def tensors() -> dict[str, Tensor]:
    """Of every kind, two of which are neighbours; one of them some columns of a larger one, and one that has gradients."""
    chance = torch.Generator().manual_seed(0)
    return {
        "bias": torch.randn(11, generator=chance),
        "columns": torch.randn(40, 60, generator=chance)[:, 10:40],
        "e4m3": torch.randn(100, generator=chance).to(torch.float8_e4m3fn),
        "flags": torch.rand(33, generator=chance) < 0.5,
        "half": torch.randn(7, 9, generator=chance).half(),
        "learnt": torch.nn.Parameter(torch.randn(50, 30, generator=chance).bfloat16()),
        "norm": torch.randn(30, generator=chance).bfloat16(),
        "steps": torch.tensor(12),
    }


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].detach().float(), other[name].detach().float()) for name in one)


def test_a_sampler_follows_a_trainer_bit_for_bit_in_the_tensors_that_it_samples_with(tmp_path: Path) -> None:
    objects, trained, before, sampled = Folder(tmp_path / "store"), tensors(), tensors(), zeros()
    sampled["columns"] = torch.zeros(40, 60)[:, 20:50]
    assert not sampled["columns"].is_contiguous()
    with Publisher.open(objects, "run-1", holder="trainer") as publisher:
        publisher.publish(None, TorchWeights(trained))
        with Receiver.open(objects, TorchWeights(sampled), "run-1", folder=tmp_path / "reader") as receiver:
            receiver.join()
            assert same(sampled, trained)
            for name in ("bias", "columns", "learnt", "half", "norm"):
                trained[name].data[::7] *= 1.5
            trained["steps"] += 1
            assert publisher.publish(TorchWeights(before), TorchWeights(trained)).manifest.old_root is not None
            assert receiver.stage() is not None
            assert same(sampled, before)
            receiver.flip()
            assert same(sampled, trained)


def test_numbers_of_which_no_deltas_are_made_are_refused_by_the_name_of_their_tensor() -> None:
    with pytest.raises(NotSupported, match=r"tensor `spins` holds torch\.complex64 numbers"):
        TorchWeights({"spins": torch.zeros(3, dtype=torch.complex64)})
