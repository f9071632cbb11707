"""The numerics id stands for all of our own code that decides about bits."""

import torch

from bloomery.models.numerics import numerics_id, sources
from bloomery.models.threads import one_thread
from tests.test_layers import internal, module_name, package

FORWARDS = ("models.decoder", "models.head", "models.kernel_probe", "train.run", "infer.sampler")
COMPUTE_NOTHING = {"types", "obs", "sync"}
"""The slab holds data, and `sync` reads weights without changing any."""


def reached(module: str, seen: set[str]) -> set[str]:
    """All modules that it loads, itself included."""
    seen.add(module)
    for found in internal():
        if found.importer == module and not found.lazy and found.target not in seen:
            reached(found.target, seen)
    return seen


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
