"""Each loss against its closed form, in float64: values, gradients, what is masked, and what is extreme."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bloomery.train.losses import KERNELS, Loss, find_loss
from bloomery.types.losses import LOSSES
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult
from tests.train import builders
from tests.train.builders import datum, finish, gradients, relative_difference

SAMPLED = [name for name, form in LOSSES.items() if "logprobs" in form.inputs]
"""The losses that compare with a sampler."""
CLIPPED = [name for name, form in LOSSES.items() if form.optional]
DOCS = Path(__file__).parents[2] / "docs" / "losses.md"


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def full(loss: Loss, given_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All inputs of a loss: options and masks that were not given are filled in, as a batch does."""
    like = given_inputs[loss.form.factor]
    filled = {name: torch.full_like(like, loss.options[name]) for name in loss.form.optional if name in loss.options}
    filled |= {name: (like != 0).to(like.dtype) for name in loss.form.masks}
    return filled | given_inputs


def one_sequence(values: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.long)


def scored(
    name: str, learner: Tensor, /, sequence: Tensor | None = None, config: dict[str, float] | None = None, **inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Terms of a loss, and the gradient of their sum."""
    loss = find_loss(name, config or {})
    leaf = learner.clone().requires_grad_()
    terms = loss.terms(leaf, full(loss, inputs), one_sequence(learner) if sequence is None else sequence)
    terms.sum().backward()
    assert leaf.grad is not None
    return terms.detach(), leaf.grad


def metrics_of(name: str, learner: Tensor, /, sequence: Tensor | None = None, **inputs: Tensor) -> dict[str, float]:
    loss = find_loss(name, {})
    return loss.metrics(learner, full(loss, inputs), one_sequence(learner) if sequence is None else sequence)


def closed_form(name: str, p: float, q: float, a: float, s: float, o: dict[str, float]) -> tuple[float, float]:
    """Term and gradient of one token with advantage `a`, by hand; `s` is the ratio of its sequence."""
    d = p - q
    r = s if name == "gspo" else math.exp(d)
    if name in ("ppo", "gspo", "dapo"):
        low, high, dual = o["clip_low_threshold"], o["clip_high_threshold"], o.get("dual_clip_threshold", math.inf)
        best = min(r * a, min(max(r, low), high) * a)
        kept = r <= high if a > 0 else low <= r <= dual
        return -(best if a > 0 else max(best, dual * a)), -r * a if kept else 0.0
    match name:
        case "importance_sampling":
            return -r * a, -r * a
        case "cispo":
            w = min(max(r, o["clip_low_threshold"]), o["clip_high_threshold"])
            return -w * a * p, -w * a
        case "dro":
            return -(p * a - o["beta"] / 2 * d * d), -(a - o["beta"] * d)
        case "stable_reinforce":
            w = min(r, o["clip_high_threshold"])
            return -w * a * p + o["kl_coeff"] / 2 * d * d, -w * a + o["kl_coeff"] * d
        case "dppo":
            moved = math.exp(p) - math.exp(q)
            kept = moved <= o["mask_high_threshold"] if a > 0 else moved >= -o["mask_low_threshold"]
            return (-r * a, -r * a) if kept else (0.0, 0.0)
        case "reinforce":
            return -a * p, -a
    raise AssertionError(name)


Token = tuple[float, float, float]
TOKENS = st.lists(
    st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.sampled_from([-2.5, -0.3, 0.0, 0.7, 3.0])),
    min_size=1,
    max_size=12,
)


def columns(tokens: list[Token]) -> tuple[Tensor, dict[str, Tensor]]:
    p, q, a = (float64(*column) for column in zip(*tokens, strict=True))
    return p, {"logprobs": q, "advantages": a}


def expected(name: str, tokens: list[Token], options: dict[str, float]) -> tuple[list[float], list[float]]:
    """Terms and gradients of one sequence; what has no advantage takes no part."""
    differences = [p - q for p, q, a in tokens if a]
    s = math.exp(math.fsum(differences) / len(differences)) if differences else 1.0
    pairs = [closed_form(name, p, q, a, s, options) if a else (0.0, 0.0) for p, q, a in tokens]
    return [term for term, _ in pairs], [gradient for _, gradient in pairs]


def assert_close(found: Tensor, wanted: list[float]) -> None:
    # Both sides are float64 and differ by the order of a few operations.
    torch.testing.assert_close(found, float64(*wanted), rtol=1e-12, atol=1e-12)


CONFIGS = [(name, {}) for name in SAMPLED] + [
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dro", {"beta": 0.5}),
    ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("dapo", {"dual_clip_threshold": 2.0}),
    ("dppo", {"mask_low_threshold": 0.0, "mask_high_threshold": 0.05}),
    ("stable_reinforce", {"clip_high_threshold": 2.5, "kl_coeff": 0.3}),
    ("stable_reinforce", {"kl_coeff": 0.0}),
]


@pytest.mark.parametrize(("name", "config"), CONFIGS)
@given(tokens=TOKENS)
def test_terms_and_gradients_are_those_of_the_formula(name, config, tokens):
    p, inputs = columns(tokens)
    terms, gradient = scored(name, p, config=config, **inputs)
    wanted = expected(name, tokens, dict(find_loss(name, config).options))
    assert_close(terms, wanted[0])
    assert_close(gradient, wanted[1])


def test_cross_entropy_is_minus_weight_times_logprob():
    logprobs, weights = float64(-1.5, -0.25, -3.0), float64(1.0, -2.5, 0.5)
    terms, gradient = scored("cross_entropy", logprobs, weights=weights)
    assert torch.equal(terms, -logprobs * weights)
    assert torch.equal(gradient, -weights)


def test_cross_entropy_of_soft_targets_is_summed_over_them():
    logprobs, weights = torch.log_softmax(torch.randn(4, 3, dtype=torch.float64), -1), torch.rand(4, 3, dtype=torch.float64)
    terms, gradient = scored("cross_entropy", logprobs, weights=weights)
    assert float(terms.sum()) == pytest.approx(float(-(weights * logprobs).sum()), rel=1e-14)
    assert torch.equal(gradient, -weights)


def test_every_loss_that_is_declared_is_computed():
    assert LOSSES.keys() == KERNELS.keys()


# Masked, empty and extreme.


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("p", "q"), [(-math.inf, 0.0), (math.nan, 0.0), (-1e300, 0.0), (-1.0, -1e6), (-1.0, 1e30)])
def test_a_factor_of_zero_keeps_any_logprob_out_of_loss_and_gradient(name, p, q):
    factors = {LOSSES[name].factor: float64(0.0, 2.0)}
    others = {"logprobs": float64(q, -1.0)} if name in SAMPLED else {}
    terms, gradient = scored(name, float64(p, -1.0), **factors, **others)
    alone, of_alone = scored(name, float64(-1.0), **{key: values[1:] for key, values in (factors | others).items()})
    assert terms.tolist() == [0.0, *alone.tolist()]
    assert gradient.tolist() == [0.0, *of_alone.tolist()]
    figures = metrics_of(name, float64(p, -1.0), **factors, **others)
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["tokens:sum"] == 1


@pytest.mark.parametrize("name", SAMPLED)
def test_the_padding_of_thresholds_at_masked_tokens_is_not_looked_at(name):
    padded = {option: float64(0.0, LOSSES[name].options[option].default) for option in LOSSES[name].optional if option in LOSSES[name].options}
    inputs = {"logprobs": float64(0.0, -1.5), "advantages": float64(0.0, 1.0)}
    plain = scored(name, float64(-3.0, -1.0), **inputs)
    assert all(torch.equal(left, right) for left, right in zip(scored(name, float64(-3.0, -1.0), **inputs, **padded), plain, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_data_without_any_factor_have_no_loss_no_gradient_and_finite_metrics(name):
    nothing = {key: torch.zeros(3) for key in LOSSES[name].inputs}
    terms, gradient = scored(name, torch.tensor([math.nan, -1.0, -math.inf]), **nothing)
    assert terms.tolist() == gradient.tolist() == [0.0] * 3
    figures = metrics_of(name, torch.tensor([math.nan, -1.0, -math.inf]), **nothing)
    assert set(figures.values()) == {0.0}
    loss = find_loss(name, {})
    assert not loss.learns({key: values[:, None] for key, values in full(loss, nothing).items()}).any()


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
@pytest.mark.parametrize(("p", "q"), [(-0.5, -100.5), (-100.5, -0.5)])
def test_extreme_ratios_follow_the_formula(name, advantage, p, q):
    tokens = [(p, q, advantage)]
    learner, inputs = columns(tokens)
    terms, gradient = scored(name, learner, **inputs)
    wanted = expected(name, tokens, dict(find_loss(name, {}).options))
    assert_close(terms, wanted[0])
    assert_close(gradient, wanted[1])


UNBOUNDED = {("importance_sampling", -2.0), ("importance_sampling", 3.0), ("ppo", -2.0), ("gspo", -2.0), ("dppo", -2.0)}
"""Losses, and signs of the advantage, whose formula grows with the ratio."""


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_a_ratio_beyond_float32_is_cut_off_or_infinite_and_never_nan(name, advantage):
    terms, gradient = scored(name, torch.tensor([-0.5]), logprobs=torch.tensor([-100.5]), advantages=torch.tensor([advantage]))
    unbounded = (name, advantage) in UNBOUNDED
    assert terms.isinf().tolist() == gradient.isinf().tolist() == [unbounded]
    assert not terms.isnan().any()
    assert not gradient.isnan().any()
    assert all(math.isfinite(value) for value in metrics_of(name, float64(-0.5), logprobs=float64(-1e5), advantages=float64(advantage)).values())


@pytest.mark.parametrize("name", LOSSES)
def test_a_logprob_that_is_not_a_number_is_not_compared_away(name):
    others = {"logprobs": float64(-1.0)} if name in SAMPLED else {}
    for factor in (1.0, -1.0):
        terms, _ = scored(name, float64(math.nan), **{LOSSES[name].factor: float64(factor)}, **others)
        assert terms.isnan().all()


@pytest.mark.parametrize("name", SAMPLED)
def test_on_policy_the_gradient_is_exactly_minus_the_advantage(name):
    logprobs = torch.log_softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)), 0)
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(1))
    advantages[::7] = 0
    sequence = torch.arange(50) // 9
    _, gradient = scored(name, logprobs, sequence, logprobs=logprobs.clone(), advantages=advantages)
    assert torch.equal(gradient, -advantages)


@given(tokens=TOKENS, high=st.floats(1, 10), pull=st.floats(0, 1))
def test_no_token_moves_stable_reinforce_further_than_its_bound(tokens, high, pull):
    p, inputs = columns(tokens)
    _, gradient = scored("stable_reinforce", p, config={"clip_high_threshold": high, "kl_coeff": pull}, **inputs)
    bound = high * inputs["advantages"].abs() + pull * (p - inputs["logprobs"]).abs()
    assert (gradient.abs() <= bound * (1 + 1e-12)).all()


# Thresholds per token.


@pytest.mark.parametrize("name", CLIPPED)
@given(tokens=TOKENS, data=st.data())
def test_thresholds_may_differ_from_token_to_token(name, tokens, data):
    options = [option for option in LOSSES[name].optional if option in LOSSES[name].options]
    ranges = {"clip_low_threshold": st.floats(0, 1), "clip_high_threshold": st.floats(1, 5)}
    chosen = {option: [data.draw(ranges[option]) for _ in tokens] for option in options}
    p, inputs = columns(tokens)
    terms, gradient = scored(name, p, **inputs, **{option: float64(*values) for option, values in chosen.items()})
    for index in range(len(tokens)):
        own = dict(find_loss(name, {}).options) | {option: values[index] for option, values in chosen.items()}
        wanted = expected(name, tokens, own)
        assert_close(terms[index : index + 1], wanted[0][index : index + 1])
        assert_close(gradient[index : index + 1], wanted[1][index : index + 1])


# Sequences.


def test_the_ratio_of_gspo_is_the_mean_over_what_the_mask_marks():
    p, q = float64(-1.0, -2.0, -3.0, -1.0), float64(-1.5, -1.0, -9.0, -2.0)
    advantages, mask = float64(1.0, -1.0, 1.0, 0.0), float64(1.0, 1.0, 0.0, 1.0)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    terms, gradient = scored("gspo", p, config=wide, logprobs=q, advantages=advantages, sequence_ratio_mask=mask)
    s = math.exp((0.5 - 1.0 + 1.0) / 3)
    assert_close(terms, [-s, s, -s, 0.0])
    assert_close(gradient, [-s, s, -s, 0.0])


@given(sequences=st.lists(TOKENS, min_size=1, max_size=4), name=st.sampled_from(SAMPLED))
def test_a_batch_has_the_terms_of_its_data_and_they_add_up(sequences, name):
    learner, inputs = columns([token for tokens in sequences for token in tokens])
    sequence = torch.tensor([index for index, tokens in enumerate(sequences) for _ in tokens])
    terms, gradient = scored(name, learner, sequence, **inputs)
    figures = metrics_of(name, learner, sequence, **inputs)
    alone = [scored(name, p, **own) for p, own in map(columns, sequences)]
    assert torch.equal(terms, torch.cat([part for part, _ in alone]))
    assert torch.equal(gradient, torch.cat([part for _, part in alone]))
    parts = [metrics_of(name, p, **own) for p, own in map(columns, sequences)]
    for key, value in figures.items():
        combined = max(part[key] for part in parts) if key.endswith(":max") else math.fsum(part[key] for part in parts)
        assert value == pytest.approx(combined, rel=1e-9, abs=1e-9)


@given(sequences=st.lists(TOKENS, min_size=1, max_size=4), name=st.sampled_from(SAMPLED), data=st.data())
def test_the_order_of_the_data_changes_no_term(sequences, name, data):
    order = data.draw(st.permutations(range(len(sequences))))
    terms = {}
    for arrangement in (range(len(sequences)), order):
        learner, inputs = columns([token for index in arrangement for token in sequences[index]])
        sequence = torch.tensor([index for index in arrangement for _ in sequences[index]])
        found, _ = scored(name, learner, sequence, **inputs)
        terms[tuple(arrangement)] = {index: found[sequence == index].tolist() for index in arrangement}
    left, right = terms[tuple(range(len(sequences)))], terms[tuple(order)]
    assert left == right


def sampled(*, seed: int = 3) -> tuple[Datum, ...]:
    """Rollouts of a policy that is not the run's: `logprobs` are near what a fresh run computes, and a third is prompt."""
    noise, own = np.random.default_rng(seed), builders.supervised([5, 37, 12, 64, 4, 90])
    near = builders.logprobs(finish(builders.run(), builders.learn(own, backward=False)))
    data = []
    for example, values in zip(own, near, strict=True):
        advantages = np.where(example.inputs["weights"].numpy() == 0, 0, noise.normal(size=len(values)))
        shifted = np.where(advantages == 0, 0, values + noise.uniform(-0.5, 0.5, len(values)))
        data.append(datum(example.tokens.numpy(), example.inputs["target_tokens"].numpy(), logprobs=shifted, advantages=advantages))
    return tuple(data)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_split_into_micro_batches_changes_neither_result_nor_gradient(name):
    operation = ForwardBackward(loss=name, loss_config={}, data=sampled())
    model = builders.decoder()
    whole, parts = builders.run(model), builders.run(model, budget=64)
    left, right = finish(whole, operation), finish(parts, operation)
    assert isinstance(left, ForwardBackwardResult), left
    assert left == right
    # float32 sums in another order.
    assert relative_difference(gradients(parts), gradients(whole)) < 3e-6
    assert left.metrics["tokens:sum"] == sum(np.count_nonzero(one.inputs["advantages"].numpy()) for one in operation.data)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_run_takes_thresholds_from_options_and_from_tensors_alike(name):
    """Data with tensors of their own and data without may share a batch."""
    # A mean over a sequence strays less than a token.
    width = 0.03 if name == "gspo" else 0.25
    values = {"clip_low_threshold": 1 - width, "clip_high_threshold": 1 + width}
    options = {option: values[option] for option in LOSSES[name].optional if option in values}
    data, model = sampled(), builders.decoder()
    told = [
        Datum(
            tokens=one.tokens, inputs=datum([], [], **{key: np.full(one.tokens.shape, value) for key, value in options.items()}).inputs | one.inputs
        )
        for one in data
    ]
    left, right = builders.run(model), builders.run(model)
    by_option = finish(left, ForwardBackward(loss=name, loss_config=dict(options), data=data))
    by_tensor = finish(right, ForwardBackward(loss=name, loss_config={}, data=tuple(told)))
    mixed = finish(builders.run(model), ForwardBackward(loss=name, loss_config=dict(options), data=(*told[:3], *data[3:])))
    by_default = finish(builders.run(model), ForwardBackward(loss=name, loss_config={}, data=data))
    assert by_option == by_tensor == mixed
    assert by_option.metrics["clipped:sum"] > 0
    assert by_option.metrics["clipped:sum"] != by_default.metrics["clipped:sum"]
    assert relative_difference(gradients(right), gradients(left)) == 0


# Metrics.


def test_ratio_metrics_are_those_of_the_ratio():
    p, q, advantages = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.75, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    ratios = [math.exp(0.5), math.exp(-0.25)]
    for name in SAMPLED:
        metrics = metrics_of(name, p, logprobs=q, advantages=advantages)
        assert metrics["tokens:sum"] == 2
        assert metrics["ratio:sum"] == pytest.approx(sum(ratios), rel=1e-12)
        assert metrics["k3:sum"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios), rel=1e-12)
        assert metrics["logprob_diff:max"] == 0.5


def test_on_policy_k3_is_exactly_zero():
    logprobs = torch.randn(9)
    metrics = metrics_of("importance_sampling", logprobs, logprobs=logprobs.clone(), advantages=torch.ones(9))
    assert (metrics["k3:sum"], metrics["logprob_diff:max"], metrics["ratio:sum"]) == (0.0, 0.0, 9.0)


@pytest.mark.parametrize(
    ("name", "clipped"),
    [("ppo", 2), ("dapo", 2), ("cispo", 1), ("stable_reinforce", 2), ("dppo", 2), ("importance_sampling", None), ("dro", None), ("reinforce", None)],
)
def test_clipped_counts_the_tokens_that_a_threshold_cut_off(name, clipped):
    # Ratios of about 5, 1.35, 0.14 and 1; the last takes no part.
    p, q = float64(-0.1, -0.1, -2.1, -1.0), float64(-1.7, -0.4, -0.1, -1.0)
    metrics = metrics_of(name, p, logprobs=q, advantages=float64(1.0, 1.0, 1.0, 0.0))
    assert metrics.get("clipped:sum") == clipped


def test_gspo_clips_whole_sequences():
    p, q = float64(-1.0, -1.0, -1.0, -2.0, -2.0), float64(-2.0, -0.9, -1.5, -2.0, -2.0)
    metrics = metrics_of("gspo", p, torch.tensor([0, 0, 0, 1, 1]), logprobs=q, advantages=torch.ones(5, dtype=torch.float64))
    assert metrics["clipped:sum"] == 3


def test_cross_entropy_metrics_count_what_has_weight():
    metrics = metrics_of("cross_entropy", torch.zeros(3), weights=torch.tensor([0.0, -2.0, 0.5]))
    assert metrics == {"weights:sum": -1.5, "tokens:sum": 2.0}


@pytest.mark.parametrize("name", LOSSES)
def test_metric_names_carry_one_reduction(name):
    for key in metrics_of(name, torch.zeros(2), **{key: torch.ones(2) for key in LOSSES[name].inputs}):
        assert key.count(":") == 1
        assert key.split(":")[1] in ("sum", "max", "min", "mean")


@pytest.mark.parametrize("name", ["cross_entropy", "gspo"])
def test_sums_do_not_depend_on_the_number_of_threads(name):
    values = torch.from_numpy(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
    inputs = {key: values * (1 + number) for number, key in enumerate(LOSSES[name].inputs)}
    threads = torch.get_num_threads()
    found = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        terms, _ = scored(name, values, torch.arange(100_000) // 60_000, **inputs)
        found.add((tuple(metrics_of(name, values, **inputs).items()), terms.numpy().tobytes()))
    torch.set_num_threads(threads)
    assert len(found) == 1


# Documentation.


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_documented_with_its_inputs_and_defaults(name):
    sections = {section.split("\n", 1)[0]: section for section in DOCS.read_text().split("\n## ")}
    assert f"`{name}`" in sections
    form, section = LOSSES[name], sections[f"`{name}`"]
    assert all(f"`{key}`" in section for key in (*form.inputs, *form.optional))
    for option, declared in form.options.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| `{option}` |"))
        assert [float(cell) for cell in row.split("|")[2:4]] == [declared.default, declared.least]
        assert float(row.split("|")[4]) == declared.most
