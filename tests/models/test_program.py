"""Programs compute again what a recorder saw kernels compute, and a recorder refuses what it saw anybody else compute."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from bloomery.models.native import attention, bindings, gemm, low_rank, softmax
from bloomery.models.pads import BLOCK_PLACES
from bloomery.models.pointwise import add, rms_norm, rotate, swiglu
from bloomery.models.products import packed, product
from bloomery.models.program import Move, Program, Recorder, Workspace
from bloomery.models.spans import Spans

pytestmark = pytest.mark.skipif(not gemm.multiplies(torch.empty(0)), reason="no native products here")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


class Chain:
    """Some of everything that a block computes, on views of what it computed before."""

    def __init__(self, seed: int = 0) -> None:
        self.first, self.second, self.weight = packed(noise(48, 32, seed=seed)), noise(32, 24, seed=seed), noise(16, seed=seed) + 2.0
        self.bias = noise(48, seed=seed + 3)
        self.a_rI, self.b_Or = noise(32, 16, seed=seed).t(), noise(16, 48, seed=seed).t()
        self.cos, self.sin = noise(6, 1, 8, seed=4), noise(6, 1, 8, seed=5)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.first, self.second, self.weight, self.bias, self.a_rI, self.b_Or]

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        out_RO = product(x_RI, self.first)
        low_rank.add_updates(out_RO[2:], x_RI[2:], [(self.a_rI, self.b_Or), (self.a_rI, self.b_Or)])
        heads_RNE = add(out_RO, self.bias).unflatten(1, (3, 16))
        turned_RNE = rotate(rms_norm(heads_RNE, self.weight, 1e-6), self.cos, self.sin)
        return add(x_RI, product(swiglu(turned_RNE.flatten(1)), self.second))


def recorded(compute, *inputs):
    workspace = Workspace()
    with Recorder(workspace) as recorder:
        out = compute(*inputs)
    return recorder, out, workspace


def test_a_program_gives_the_same_bits_for_other_numbers_in_the_same_place():
    chain, x_RI = Chain(), noise(6, 32, seed=1)
    expected = chain(x_RI)
    recorder, out, _ = recorded(chain, x_RI)
    assert recorder.refused is None
    assert torch.equal(out, expected)
    program = Program(recorder.calls)
    for seed in range(2, 5):
        x_RI.copy_(noise(6, 32, seed=seed))
        program.run(bindings.run)
        assert torch.equal(out, chain(x_RI))
        assert not torch.equal(out, expected)


def test_a_program_is_moved_to_other_weights_and_the_first_one_stays_as_it_is():
    one, other, x_RI = Chain(), Chain(seed=90), noise(6, 32, seed=1)
    recorder, out, _ = recorded(one, x_RI)
    program = Program(recorder.calls)
    pairs = list(zip(one.weights, other.weights, strict=True))
    moved = program.moved([Move(old.data_ptr(), old.nbytes, new.data_ptr()) for old, new in pairs])
    for seed in range(2, 5):
        x_RI.copy_(noise(6, 32, seed=seed))
        for runs, computes in ((moved, other), (program, one)):
            runs.run(bindings.run)
            assert torch.equal(out, computes(x_RI))
    assert not torch.equal(one(x_RI), other(x_RI))
    moved.moved([Move(new.data_ptr(), new.nbytes, old.data_ptr()) for old, new in pairs]).run(bindings.run)
    assert torch.equal(out, one(x_RI))


def test_a_program_that_is_moved_nowhere_computes_the_same():
    chain, x_RI = Chain(), noise(6, 32, seed=1)
    recorder, out, _ = recorded(chain, x_RI)
    x_RI.copy_(noise(6, 32, seed=2))
    Program(recorder.calls).moved([]).run(bindings.run)
    assert torch.equal(out, chain(x_RI))


def test_queries_attend_in_a_program_as_far_as_their_sequences_are_by_then():
    (keys, values), q_RHE = (noise(9, 2, BLOCK_PLACES, 16, seed=seed) for seed in (0, 1)), noise(3, 4, 16, seed=2)
    blocks = torch.tensor([[4, 0, 8], [7, 1, 6], [3, 2, 5]])

    def spans(starts):
        return Spans.of([(row, 2 - row, start, 1) for row, start in enumerate(starts)])._replace(tables_SM=blocks)

    def attend(own, window=None):
        attention.keep(keys, q_RHE[:, :2], own)
        return attention.attend(q_RHE, keys, values, own, window)[0]

    own = spans([3, 0, 9])._replace(longest=3 * BLOCK_PLACES)
    recorder, out, _ = recorded(attend, own, 20)
    program = Program(recorder.calls)
    for turn, starts in enumerate(([4, 1, 10], [63, 40, 0], [1, 90, 64])):
        blocks.copy_(blocks.roll(turn, 1))
        own.places_N4.copy_(spans(starts).places_N4)
        program.run(bindings.run)
        assert torch.equal(out, attend(spans(starts), 20))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: x.t().contiguous(),
        lambda x: x.add_(1),
        lambda x: torch.zeros(3),
        lambda x: torch.cat([x, x]),
        lambda x: x[0, 0].item(),
        lambda x: bool(x[0, 0]),
        lambda x: torch.equal(x, x),
    ],
    ids=["multiplies", "copies", "adds in place", "fills", "joins", "reads a number", "decides", "compares"],
)
def test_a_recorder_refuses_what_torch_computes(compute):
    assert recorded(compute, noise(6, 32))[0].refused is not None


def test_a_recorder_refuses_kernels_that_programs_do_not_call():
    assert recorded(softmax.logsumexp, noise(6, 32))[0].refused == "logsumexp"


@pytest.mark.slow
def test_recording_imports_no_compiler():
    code = "import sys, torch\nfrom bloomery.models.program import Recorder, Workspace\nwith Recorder(Workspace()) as seen: torch.ones(2) + 1\n"
    code += "assert seen.refused is not None\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


def test_looking_at_memory_in_another_way_is_not_computing():
    recorder, *_ = recorded(lambda x: x[1:].unflatten(1, (2, 16)).split([1, 1], 1)[0].flatten(1).transpose(0, 1), noise(6, 32))
    assert recorder.refused is None
    assert not recorder.calls


@pytest.mark.slow
def test_memory_is_handed_out_again_when_nobody_looks_at_it_any_more():
    workspace = Workspace()
    first = workspace.floats((4, 8))
    view, place = first[1:].t(), first.data_ptr()
    del first
    gc.collect()
    second = workspace.floats((4, 8))
    assert second.data_ptr() != place
    del view
    gc.collect()
    assert workspace.floats((2, 8)).data_ptr() == place
    assert place % 64 == second.data_ptr() % 64 == 0


def test_what_other_threads_compute_meanwhile_is_not_recorded():
    chain, x_RI = Chain(), noise(6, 32)
    elsewhere = threading.Thread(target=lambda: chain(x_RI.clone()))
    with Recorder(Workspace()) as recorder:
        elsewhere.start()
        elsewhere.join()
    assert not recorder.calls
    assert recorder.refused is None


def test_a_recorder_is_over_when_what_it_watched_breaks():
    def broken(x_RI):
        product(x_RI, packed(noise(8, 32)))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorded(broken, noise(6, 32))
    with Recorder(Workspace()) as recorder:
        pass
    Chain()(noise(6, 32))
    assert not recorder.calls
