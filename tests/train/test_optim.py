"""AdamW against torch's own."""

import math

import pytest
import torch

from bloomery.train.optim import AdamW, gradient_norm
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import AdamParams, OptimStep
from tests.engine.test_plain import restored_threads
from tests.train import builders
from tests.train.builders import finish, learn, supervised


def noise(seed: int, size: int = 1003) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_steps_equal_those_of_torch(weight_decay, clip):
    masters, ours = noise(0), noise(0)
    theirs = torch.nn.Parameter(masters)
    reference = torch.optim.AdamW([theirs], fused=True)
    adam = AdamW(ours)
    for index in range(5):
        # Every step brings its own hyper-parameters.
        params = AdamParams(learning_rate=0.1 / (index + 1), beta2=0.95 + 0.01 * index, weight_decay=weight_decay, grad_clip_norm=clip)
        gradient = noise(10 + index)
        theirs.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], clip or math.inf)
        reference.param_groups[0].update(lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=weight_decay)
        reference.step()
        assert adam.step(ours, gradient, params) == pytest.approx(float(norm), rel=1e-5)
    # The same kernel; only the clipping factor comes from a norm in float64 instead of float32.
    torch.testing.assert_close(ours, theirs.data, rtol=0 if not clip else 1e-6, atol=0 if not clip else 1e-6)
    assert adam.steps == 5


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_run_moves_as_torchs_optimizer_moves_its_tensors(rank, weight_decay):
    trained = builders.run(builders.decoder(), rank=rank)
    theirs = {name: torch.nn.Parameter(master.clone()) for name, master in trained.weights.named(trained.weights.masters)}
    assert all(tensor.numel() % 16 == 0 for tensor in theirs.values())
    reference = torch.optim.AdamW(list(theirs.values()), fused=True)
    for index in range(30):
        finish(trained, learn(supervised([20, 33], seed=index)))
        gradients = builders.gradients(trained)
        params = AdamParams(learning_rate=1e-2 / (index + 1), beta2=0.95 + 0.001 * index, eps=1e-8, weight_decay=weight_decay)
        for name, tensor in theirs.items():
            tensor.grad = gradients[name]
        reference.param_groups[0].update(lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=weight_decay)
        reference.step()
        finish(trained, OptimStep(adam=params))
    # To the bit: whole cache lines of one flat vector take the path of the kernel that they take as tensors of their own.
    for name, master in trained.weights.named(trained.weights.masters):
        assert torch.equal(master, theirs[name].data), name


def test_the_norm_of_many_gradients_is_added_up_piece_by_piece():
    gradients = noise(5, (1 << 20) + 77)
    assert gradient_norm(gradients) == pytest.approx(float(gradients.double().norm()), rel=1e-12)


def test_the_plain_formula_in_float64_agrees():
    masters, adam = noise(0, 50), None
    adam = AdamW(masters)
    params = AdamParams(learning_rate=0.01, weight_decay=0.2, eps=1e-8)
    expected, first, second = noise(0, 50).double(), 0.0, 0.0
    for index in (1, 2, 3):
        gradient = noise(index, 50)
        adam.step(masters, gradient.clone(), params)
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        expected = expected * (1 - 0.01 * 0.2)
        expected = expected - 0.01 * (first / (1 - 0.9**index)) / ((second / (1 - 0.95**index)).sqrt() + 1e-8)
    # float32 arithmetic over three steps.
    torch.testing.assert_close(masters.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_norm_is_the_euclidean_one_whatever_the_number_of_threads():
    gradients = noise(3, 200_000)
    threads = torch.get_num_threads()
    norms = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        norms.add(gradient_norm(gradients))
    torch.set_num_threads(threads)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(gradients.double().norm()), rel=1e-12)


def test_clipping_scales_only_what_is_over_the_limit():
    small, large = torch.full((4,), 0.1), torch.full((4,), 10.0)
    for gradient, expected in ((small, 0.2), (large, 1.0)):
        AdamW(torch.zeros(4)).step(torch.zeros(4), gradient, AdamParams(learning_rate=0.1, grad_clip_norm=1.0))
        assert float(gradient.norm()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    masters = noise(0)
    adam = AdamW(masters)
    gradient = noise(1)
    gradient[17] = poison
    with pytest.raises(InvalidInput, match="gradient norm"):
        adam.step(masters, gradient, AdamParams(learning_rate=0.1))
    assert torch.equal(masters, noise(0))
    assert adam.steps == 0


def test_a_gradient_whose_square_no_float32_holds_is_refused_unless_it_is_clipped():
    masters = noise(0)
    adam = AdamW(masters)
    gradient = noise(1)
    gradient[17] = 3e19
    with pytest.raises(InvalidInput, match="grad_clip_norm"):
        adam.step(masters, gradient, AdamParams(learning_rate=0.1))
    assert torch.equal(masters, noise(0))
    adam.step(masters, gradient, AdamParams(learning_rate=0.1, grad_clip_norm=1.0))
    assert torch.isfinite(adam.second).all()


def test_a_learning_rate_of_zero_is_allowed_and_changes_only_the_moments():
    masters = noise(0)
    adam = AdamW(masters)
    adam.step(masters, noise(1), AdamParams(learning_rate=0.0))
    assert torch.equal(masters, noise(0))
    assert float(adam.first.abs().sum()) > 0


def test_a_step_has_the_same_bits_with_any_number_of_threads():
    # Several stretches for each thread, and rests that fill no vector.
    size, found = 3 * (1 << 17) + 11, []
    with restored_threads():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            masters, adam = noise(0, size), AdamW(noise(0, size))
            for index in range(2):
                adam.step(masters, noise(1 + index, size), AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
            found.append(masters)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
