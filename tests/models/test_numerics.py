"""The numerics id stands for all of our own code that decides about bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bloomery.infer.fidelity import sample, trainer_logprobs
from bloomery.infer.versions import Model
from bloomery.models.kernel_probe import probe
from bloomery.models.native import attention
from bloomery.models.numerics import numerics_id, sampling_id, sources
from bloomery.models.threads import one_thread
from bloomery.types.fidelity import Prompt
from tests.test_layers import internal, module_name, package
from tests.train.builders import VOCAB, decoder

FORWARDS = ("models.decoder", "models.head", "models.kernel_probe", "train.run", "infer.sampler")
COMPUTE_NOTHING = {"types", "obs", "disk", "sync"}
"""The slab holds data, and `sync` reads weights without changing any."""


def reached(module: str, seen: set[str]) -> set[str]:
    """All modules that it loads, itself included."""
    seen.add(module)
    for found in internal():
        if found.importer == module and not found.lazy and found.target not in seen:
            reached(found.target, seen)
    return seen


@pytest.mark.slow
def test_every_module_that_a_forward_depends_on_is_in_the_id() -> None:
    needed = {name for forward in FORWARDS for name in reached(forward, set())}
    assert {"models.adapters", "models.block", "models.kernel_probe.products", "train.passes", "infer.runner"} < needed
    left_out = needed - {module_name(path) for path in sources()}
    assert {name for name in left_out if package(name) not in COMPUTE_NOTHING} == set()


def test_what_decides_about_bits_is_in_the_id() -> None:
    own = numerics_id(torch.float32)
    assert own == numerics_id(torch.float32)
    assert own != numerics_id(torch.bfloat16)
    with one_thread():
        alone = numerics_id(torch.float32)
    assert (alone == own) == (torch.get_num_threads() == 1)


def test_what_is_sampled_has_one_id_for_any_threads_only_where_its_bits_do_not_depend_on_them() -> None:
    with threads(2):
        any_threads, two, own = (
            sampling_id(torch.float32, any_threads=True),
            sampling_id(torch.float32, any_threads=False),
            numerics_id(torch.float32),
        )
    with threads(1):
        assert sampling_id(torch.float32, any_threads=True) == any_threads
        assert sampling_id(torch.float32, any_threads=False) != two
        assert numerics_id(torch.float32) != own
    assert any_threads not in (two, own)
    assert sampling_id(torch.bfloat16, any_threads=True) != any_threads


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("ours", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_probe_says_so_a_trainer_with_more_threads_has_the_bits_of_a_sampler_with_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ours: bool, experts: bool
) -> None:
    if not ours:
        monkeypatch.setattr(attention, "attends", lambda *tensors: False)
    model = Model("base", decoder(dtype=dtype, experts=experts), None)
    with threads(2):
        trainers = probe(model.decoder)
    with threads(1):
        samplers = probe(model.decoder)
        tokens = np.random.default_rng(0).integers(0, VOCAB, 600).tolist()
        prompts = [Prompt(tuple(tokens[:length]), 1, number, late=number == 2) for number, length in enumerate((3, 40, 600))]
        sampled = sample(model, prompts, 24, samplers.form)
    if not (trainers.bit_exact and trainers.form.one_thread and samplers.bit_exact):
        pytest.skip("on this machine these bits depend on threads, and so do the ids")
    with threads(2):
        said = trainer_logprobs(model, sampled)
    assert all(np.array_equal(theirs, mine.logprobs.numpy()) for theirs, mine in zip(said, sampled, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
