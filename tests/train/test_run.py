"""A run's operations: what they add up to, and what a failure leaves behind."""

import math
from contextlib import suppress

import numpy as np
import pytest
import torch

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.factors import padded_rank
from bloomery.models.head import token_logprobs
from bloomery.models.pads import packed_positions
from bloomery.train.passes import compute
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Failed, ForwardBackwardResult, OptimStepResult, Rejected, SaveCheckpoint
from tests.train import builders
from tests.train.builders import datum, finish, gradients, learn, logprobs, relative_difference, step, supervised, train

LENGTHS = [5, 37, 12, 64, 1, 130]
# Lengths at which attention with and without the exact mode's pads was seen to differ.
TELLING_LENGTHS = [200, 700]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return builders.decoder()


def rollouts(trained, lengths, *, off_policy: float = 0.0):
    """Data whose `logprobs` are the run's own, moved by up to `off_policy`; the first third is prompt."""
    data = supervised(lengths)
    noise = np.random.default_rng(5)
    own = logprobs(finish(trained, learn(data, backward=False)))
    made = []
    for example, values in zip(data, own, strict=True):
        advantages = np.where(example.inputs["weights"].numpy() == 0, 0, noise.normal(size=len(values))).astype(np.float32)
        sampled = np.where(advantages == 0, 0, values + off_policy * noise.uniform(-1, 1, len(values)))
        made.append(datum(example.tokens.numpy(), example.inputs["target_tokens"].numpy(), logprobs=sampled, advantages=advantages))
    return tuple(made)


def test_a_fresh_adapter_changes_no_bit_of_the_base(model):
    data = supervised(LENGTHS + TELLING_LENGTHS)
    ours = logprobs(finish(builders.run(model), learn(data, backward=False)))
    for example, own in zip(data, ours, strict=True):
        lengths = [len(own)]
        rows = -(-len(own) // 4) * 4
        tokens = torch.nn.functional.pad(torch.from_numpy(example.tokens.numpy().astype(np.int64)), (0, rows - len(own)))
        targets = torch.nn.functional.pad(torch.from_numpy(example.inputs["target_tokens"].numpy().copy()), (0, rows - len(own)))
        hidden = model.hidden(tokens, packed_positions(lengths), PackedAttention(lengths, exact=True), AdapterRows(((None, 0, rows),)))
        assert np.array_equal(own, token_logprobs(hidden, model.head_weight, None, targets[:, None])[: len(own), 0].numpy())


def test_the_loss_is_the_sum_over_tokens_and_data(model):
    data = supervised(LENGTHS)
    result = finish(builders.run(model), learn(data))
    assert isinstance(result, ForwardBackwardResult)
    terms = [-values.astype(np.float64) * example.inputs["weights"].numpy() for values, example in zip(logprobs(result), data, strict=True)]
    assert result.metrics["loss:sum"] == pytest.approx(sum(float(values.sum()) for values in terms), rel=1e-6)
    for output, expected in zip(result.outputs, terms, strict=True):
        assert np.allclose(output["elementwise_loss"].numpy(), expected, rtol=1e-6)
        assert output["elementwise_loss"].shape == output["logprobs"].shape == expected.shape


def test_backward_and_forward_only_return_every_logprob(model):
    data = supervised(LENGTHS)
    trained = builders.run(model)
    both = zip(logprobs(finish(trained, learn(data))), logprobs(finish(trained, learn(data, backward=False))), strict=True)
    for plain, exact in both:
        assert np.isfinite(plain).all()
        assert (exact < 0).all()
        # Attention without the exact mode's pads: a few units in the last place of float32.
        assert np.allclose(plain, exact, rtol=0, atol=5e-6)


def test_a_log_probability_is_the_same_whether_its_token_learns_or_not(model):
    data = supervised(LENGTHS)
    everything = [
        datum(each.tokens.numpy(), each.inputs["target_tokens"].numpy(), weights=np.ones(each.tokens.shape[0], np.float32)) for each in data
    ]
    trained = builders.run(model)
    for half, whole in zip(logprobs(finish(trained, learn(data))), logprobs(finish(trained, learn(tuple(everything)))), strict=True):
        assert np.array_equal(half, whole)


def test_forward_only_leaves_no_gradient(model):
    trained = builders.run(model)
    finish(trained, learn(supervised(LENGTHS), backward=False))
    assert trained.at_rest
    assert not any(gradient.any() for gradient in gradients(trained).values())


def test_gradients_of_a_batch_are_the_sum_over_its_data(model):
    data = supervised(LENGTHS)
    together, one_by_one = builders.run(model), builders.run(model)
    finish(together, learn(data))
    train(one_by_one, [learn((example,)) for example in data])
    # float32 sums in another order.
    assert relative_difference(gradients(together), gradients(one_by_one)) < 2e-6


@pytest.mark.parametrize("budget", [64, 132, 200])
def test_the_split_into_micro_batches_does_not_change_the_gradient(model, budget):
    data = supervised(LENGTHS)
    whole, parts = builders.run(model), builders.run(model, budget=budget)
    left, right = finish(whole, learn(data)), finish(parts, learn(data))
    # float32 sums in another order; each row's log-probability keeps its bits, and so do the metrics.
    assert relative_difference(gradients(parts), gradients(whole)) < 2e-6
    assert left == right


def test_a_run_pauses_after_every_micro_batch(model):
    work = builders.run(model, budget=64).execute(learn(supervised([60, 60, 60])))
    shares = [next(work)]
    with suppress(StopIteration):
        while True:
            shares.append(work.send(compute(shares[-1:])[0]))
    assert [share.packed.lengths for share in shares] == [[60]] * 3


def test_a_datum_of_weights_zero_adds_nothing(model):
    quiet = datum(np.arange(9), np.arange(9), weights=np.zeros(9))
    trained = builders.run(model)
    result = finish(trained, learn((quiet,)))
    assert result.metrics["loss:sum"] == 0
    assert (logprobs(result)[0] < 0).all()
    assert trained.at_rest


def test_negative_weights_turn_the_gradient_around(model):
    plus, minus = builders.run(model), builders.run(model)
    finish(plus, learn(supervised([20])))
    finish(minus, learn(supervised([20], weight=-1.0)))
    assert relative_difference({name: -value for name, value in gradients(minus).items()}, gradients(plus)) == 0


def test_soft_targets_weigh_several_tokens_per_position(model):
    hard = datum(np.arange(8), np.full(8, 5), weights=np.full(8, 0.75))
    other = datum(np.arange(8), np.full(8, 9), weights=np.full(8, 0.25))
    soft = datum(np.arange(8), np.tile([5, 9], (8, 1)), weights=np.tile([0.75, 0.25], (8, 1)))
    mixed, apart = builders.run(model), builders.run(model)
    result = finish(mixed, learn((soft, hard)))
    assert [values.shape for values in logprobs(result)] == [(8, 2), (8,)]
    train(apart, [learn((hard,)), learn((other,)), learn((hard,))])
    assert relative_difference(gradients(mixed), gradients(apart)) < 2e-6


def test_on_policy_sampling_weights_give_exactly_the_policy_gradient(model):
    # Importance sampling at ratio 1 and cross-entropy weighted by the advantage are the same gradient.
    reinforce, weighted = builders.run(model), builders.run(model)
    data = rollouts(reinforce, LENGTHS + TELLING_LENGTHS)
    result = finish(reinforce, learn(data, loss="importance_sampling"))
    assert result.metrics["k3:sum"] == 0, "log-probs of training equal those of scoring, to the bit"
    assert result.metrics["logprob_diff:max"] == 0
    finish(weighted, learn(tuple(datum(d.tokens.numpy(), d.inputs["target_tokens"].numpy(), weights=d.inputs["advantages"].numpy()) for d in data)))
    # The attention kernels of the two losses differ (exact and plain).
    assert relative_difference(gradients(reinforce), gradients(weighted)) < 2e-5


@pytest.mark.parametrize("learning", [1, 2, 3, 5])
def test_few_learning_rows_keep_the_bits_they_have_in_company(model, learning):
    trained = builders.run(model)
    advantages = np.zeros(40)
    advantages[-learning:] = 1
    tokens, targets = np.arange(40), np.arange(40) % 7
    own = logprobs(finish(trained, learn((datum(tokens, targets, weights=advantages),), backward=False)))[0]
    result = finish(trained, learn((datum(tokens, targets, logprobs=own, advantages=advantages),), loss="importance_sampling"))
    assert result.metrics["logprob_diff:max"] == 0


def test_importance_sampling_equals_a_finite_difference(model):
    trained = builders.run(model, train_unembed=True)
    train(trained, [learn(supervised(LENGTHS)), step()])
    data = rollouts(trained, [24, 40], off_policy=0.3)
    finish(trained, learn(data, loss="importance_sampling"))
    gradient = trained.weights.gradients.clone()
    masters = trained.weights.masters.clone()
    direction = torch.randn(masters.shape, generator=torch.Generator().manual_seed(0))
    losses = []
    for sign in (1, -1):
        trained.weights.masters.copy_(masters + sign * 2e-4 * direction)
        trained.weights.refresh()
        losses.append(finish(trained, learn(data, loss="importance_sampling", backward=False)).metrics["loss:sum"])
    # float32 losses: the quotient keeps about three digits.
    assert (losses[0] - losses[1]) / 4e-4 == pytest.approx(float(gradient @ direction), rel=5e-3)


def test_training_lowers_the_loss(model):
    trained = builders.run(model)
    data = supervised([20, 30], seed=3)
    data = tuple(datum(d.tokens.numpy(), d.inputs["target_tokens"].numpy(), weights=np.ones(d.tokens.shape)) for d in data)
    losses = [train(trained, [learn(data), step(3e-2)])[0].metrics["loss:sum"] for _ in range(12)]
    assert losses[-1] < 0.1 * losses[0]
    assert trained.step == 12


def test_a_step_reports_the_norm_and_clears_the_gradients(model):
    trained = builders.run(model)
    finish(trained, learn(supervised(LENGTHS)))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients(trained).values()))
    assert not trained.at_rest
    result = finish(trained, step())
    assert isinstance(result, OptimStepResult)
    assert result.metrics == {"grad_norm": pytest.approx(norm, rel=1e-6), "step": 1.0}
    assert trained.at_rest
    assert not trained.weights.gradients.any()


def test_targets_are_those_of_the_spec(model):
    trained = builders.run(model, train_attn=False, train_unembed=False)
    names = {slot.name.rsplit(".", 2)[-2] for slot in trained.weights.slots}
    assert names == {"gate_proj", "up_proj", "down_proj"}
    finish(trained, learn(supervised([20])))
    assert all(gradient.any() for name, gradient in gradients(trained).items() if name.endswith("lora_B"))


def test_factors_start_from_the_seed_and_their_name_alone(model):
    full, part, other = builders.run(model), builders.run(model, train_attn=False), builders.run(model, seed=8)
    masters = dict(full.weights.named(full.weights.masters))
    assert all(torch.equal(master, masters[name]) for name, master in part.weights.named(part.weights.masters))
    assert other.weights_digest() != full.weights_digest() == builders.run(model).weights_digest()
    width = masters["layers.0.mlp.up_proj.lora_A"].shape[1]
    assert 0.9 * width**-0.5 < float(masters["layers.0.mlp.up_proj.lora_A"].abs().max()) <= width**-0.5
    assert not masters["layers.0.mlp.up_proj.lora_B"].any()


@pytest.mark.parametrize("rank", [1, 8, 16, 20])
def test_zeros_around_the_factors_of_joined_targets_stay_zero(model, rank):
    trained = builders.run(model, rank=rank)
    train(trained, [learn(supervised(LENGTHS)), step(weight_decay=0.1)] * 2)
    assert sum(slot.stop - slot.start for slot in trained.weights.slots) == trained.weights.masters.numel()
    a, b = trained.weights.fused().get("layers.0.mlp.gate_up")
    width, joined = b.shape[0] // 2, 2 * rank
    assert a.shape[0] == b.shape[1] == padded_rank(joined)
    gate, up = slice(0, rank), slice(rank, joined)
    assert a[:joined].any(1).all()
    assert b[:width, gate].any(0).all()
    assert b[width:, up].any(0).all()
    for around in (a[joined:], b[:width, rank:], b[width:, gate], b[width:, joined:]):
        assert not around.any()


def test_bfloat16_trains_fp32_masters(model):
    trained = builders.run(builders.decoder(dtype=torch.bfloat16))
    data = supervised(LENGTHS)
    first = train(trained, [learn(data), step(1e-3)] * 4)[0]
    assert trained.weights.masters.dtype == trained.weights.gradients.dtype == torch.float32
    reference = builders.run(model)
    # bfloat16 keeps 8 bits: two layers of it move a log-probability by about a tenth.
    for ours, theirs in zip(logprobs(first), logprobs(finish(reference, learn(data))), strict=True):
        assert np.abs(ours - theirs).max() < 0.3
    masters, rank, scale = dict(trained.weights.named(trained.weights.masters)), 8, 4
    a, b = trained.weights.fused().get("layers.1.o")
    assert torch.equal(a[:rank], masters["layers.1.self_attn.o_proj.lora_A"].bfloat16())
    assert torch.equal(b[:, :rank], masters["layers.1.self_attn.o_proj.lora_B"].bfloat16() * scale)


def test_experts_train(model):
    trained = builders.run(builders.decoder(experts=True))
    results = train(trained, [learn(supervised([40, 30])), step()] * 6)
    assert results[-2].metrics["loss:sum"] < results[0].metrics["loss:sum"]


def failures():
    poisoned = datum(np.arange(6), np.arange(6), weights=np.full(6, math.inf))
    return [
        (learn((*supervised([8]), poisoned)), r"data\[1\]: the loss is"),
        (learn((*supervised([8]), datum(np.arange(6), np.full(6, builders.VOCAB), weights=np.ones(6)))), "outside the vocabulary"),
        (Rejected(message="row 7 is broken"), "row 7 is broken"),
    ]


@pytest.mark.parametrize(("operation", "message"), failures())
def test_a_failure_clears_the_gradients_and_fails_the_next_step_once(model, operation, message):
    trained, undisturbed = builders.run(model), builders.run(model)
    train(trained, [learn(supervised(LENGTHS)), step()])
    train(undisturbed, [learn(supervised(LENGTHS)), step()])
    good = learn(supervised([30], seed=1))
    finish(trained, good)
    failed = finish(trained, operation)
    assert isinstance(failed, Failed)
    assert failed.category == "user"
    assert message.replace("\\", "") in failed.message
    assert not trained.at_rest
    finish(trained, good)
    refused = finish(trained, step())
    assert isinstance(refused, Failed)
    assert refused.category == "user"
    assert message.replace("\\", "") in refused.message
    assert trained.at_rest
    assert trained.weights_digest() == undisturbed.weights_digest()
    for run in (trained, undisturbed):
        results = train(run, [good, step()])
        assert isinstance(results[1], OptimStepResult)
    assert trained.weights_digest() == undisturbed.weights_digest(), "the failure left no trace"


def test_the_culprit_of_a_failed_step_is_named_with_its_seq(model):
    trained = builders.run(model)
    list(trained.execute(Rejected(message="no"), seq=41))
    list(trained.execute(Rejected(message="neither"), seq=42))
    assert "rejected (seq 41): no" in finish(trained, step()).message


def test_a_step_on_gradients_that_are_not_finite_fails_alone_and_clears_them(model):
    trained = builders.run(model)
    before = trained.weights_digest()
    finish(trained, learn((datum(np.arange(40), np.arange(40), weights=np.full(40, 3e37)),)))
    failed = finish(trained, step())
    assert isinstance(failed, Failed)
    assert "the gradient norm is" in failed.message
    assert trained.at_rest
    assert trained.weights_digest() == before
    assert isinstance(train(trained, [learn(supervised([20])), step()])[1], OptimStepResult)


def test_a_foreign_error_is_the_servers_and_names_the_run(model):
    trained = builders.run(model)
    failed = finish(trained, builders.load("missing"))
    assert failed == Failed(message="run run-1: KeyError: 'missing'", category="server")
    assert "load_checkpoint: run run-1: KeyError" in finish(trained, step()).message


def test_a_save_that_fails_leaves_the_gradients_alone(model):
    class FullShelf(builders.MemoryShelf):
        def write(self, key: str, data: bytes) -> None:
            raise OSError("no space left on device")

    trained = builders.run(model, shelf=FullShelf())
    finish(trained, learn(supervised([20])))
    before = gradients(trained)
    assert isinstance(finish(trained, SaveCheckpoint(key="x")), Failed)
    assert relative_difference(gradients(trained), before) == 0
    assert isinstance(finish(trained, step()), OptimStepResult)


def test_a_run_that_would_train_nothing_is_refused_at_once(model):
    with pytest.raises(InvalidInput, match="at least"):
        builders.run(model, train_attn=False, train_mlp=False, train_unembed=False)
