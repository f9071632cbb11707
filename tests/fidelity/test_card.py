"""The card's arithmetic by closed form, its two sides against the code that trains and samples, and what it says of a difference."""

import msgspec
import numpy as np
import pytest
import torch

from bloomery.infer.attention import StepAttention
from bloomery.infer.card import NOT_HERE, measure
from bloomery.infer.fidelity import sample, trainer_logprobs, trainer_passes
from bloomery.infer.versions import Model
from bloomery.models.form import Form, plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.pads import ROW_PAD
from bloomery.train import snapshot
from bloomery.types import fidelity_text
from bloomery.types.arrays import Array
from bloomery.types.batching import rows_at_once
from bloomery.types.errors import BloomeryError, Category, Conflict, Corrupt, Unavailable, WorkerError
from bloomery.types.fidelity import LENGTHS, PLAIN_K3, TEXT_TOKENS, Prompt, Sampled, answers, compare, prompts, request, verdict
from bloomery.types.generation import GenerateFailed, Weights
from tests.fidelity.mutations import Forward
from tests.infer.builders import adapter
from tests.train.builders import datum, decoder, learn, logprobs, run, step, supervised, train

TEXT = np.random.default_rng(5).integers(0, 300, TEXT_TOKENS).tolist()
SHORT = [Prompt(tuple(TEXT[:9]), 1, 0, late=False), Prompt(tuple(TEXT[:30]), 3, 1, late=True)]


def model(**options: object) -> Model:
    return Model("m", decoder(**options), None)


def sampled(*values: float) -> Sampled:
    return Sampled(tokens=tuple(range(len(values) + 2)), logprobs=Array.of(np.array(values, np.float32)))


def test_k3_is_the_mean_of_exp_d_less_one_less_d():
    d = np.array([0.0, np.log(2), -np.log(2), 0.0])
    numbers = compare([sampled(-3, -3), sampled(-3, -3)], [(-3 + d[:2]).astype(np.float32), (-3 + d[2:]).astype(np.float32)])
    # exp(d) - 1 - d of log 2 is 1 - log 2, of -log 2 it is log 2 - 1 / 2.
    assert numbers.k3 == pytest.approx(1 / 8, rel=1e-6)
    assert numbers.mean_abs == pytest.approx(np.log(2) / 2, rel=1e-6)
    assert numbers.max_abs == pytest.approx(np.log(2), rel=1e-6)
    assert numbers.bit_equal == 0.5
    assert (numbers.sequences, numbers.tokens) == (2, 4)


def test_the_sequence_with_the_largest_difference_is_known():
    assert compare([sampled(-1), sampled(-2)], [np.float32([-1.1]), np.float32([-9])]).worst == 1


@pytest.mark.parametrize(("category", "kind"), [("user", Conflict), ("server", Unavailable), ("server", Corrupt), ("server", WorkerError)])
def test_what_a_sampler_refuses_is_raised_as_it_says_it(category: Category, kind: type[BloomeryError]):
    asked = request(SHORT[0], Weights(version="v"), 4, "r")
    failed = GenerateFailed(request_id="r", message="it cannot be served", category=category, field="prompt", code=kind.code)
    with pytest.raises(kind, match=r"^it cannot be served$") as caught:
        answers(asked, [failed])
    assert (caught.value.category, caught.value.field) == (category, None)
    of_another = [answer.tokens for answer in answers(asked, [msgspec.structs.replace(failed, request_id="another")])]
    assert of_another == [SHORT[0].tokens], "what another request met is not said of this one"


def test_one_bit_fails_an_exact_card_and_no_plain_one():
    ours = np.float32([-1.0])
    numbers = compare([sampled(float(np.nextafter(ours, np.float32(0))[0]))], [ours])
    assert (verdict(numbers, "exact"), verdict(numbers, "plain")) == ("fail", "pass")
    assert verdict(compare([sampled(-1.0)], [ours]), "exact") == "pass"


def test_a_plain_card_fails_above_its_bar():
    # k3 of a small difference is half its square.
    below, above = (compare([sampled(0.0)], [np.float32([-np.sqrt(2 * bar)])]) for bar in (0.9 * PLAIN_K3, 1.1 * PLAIN_K3))
    assert (verdict(below, "plain"), verdict(above, "plain")) == ("pass", "fail")


@pytest.mark.parametrize("theirs", [np.float32([np.nan]), np.float32([-np.inf])])
def test_numbers_that_are_not_finite_are_an_error_and_no_card(theirs):
    with pytest.raises(WorkerError, match="no finite log-probabilities"):
        compare([sampled(-1.0)], [theirs])


@pytest.mark.parametrize("context", [8, 64, 1024])
def test_prompts_leave_room_and_stand_on_both_sides_of_the_pads(context):
    asked = prompts(TEXT, context, 6)
    assert all(1 <= len(prompt.tokens) <= context - 6 for prompt in asked)
    assert {prompt.num_samples for prompt in asked} == {1, 3}
    assert asked[-1].tokens in {prompt.tokens for prompt in asked if prompt.num_samples == 3}
    if context == 1024:
        assert [len(prompt.tokens) for prompt in asked[:-1]] == list(LENGTHS)


def test_the_text_is_long_enough_for_the_longest_prompt():
    # A token of any vocabulary stands for a handful of characters.
    assert len(fidelity_text.TEXT) > 6 * max(LENGTHS)


def test_the_trainers_side_has_the_bits_of_a_training_pass():
    training = run(alpha=32.0)
    train(training, [learn(supervised([30, 40])), step()])
    adapted = Model("a", training.weights.decoder, snapshot.read(snapshot.write(training.weights), training.weights.decoder, rank=8, alpha=32.0))
    answers = sample(adapted, prompts(TEXT, 1024, 5, (3, 15, 510)), 5, Form())
    data = tuple(datum(each.tokens[:-1], each.tokens[1:], weights=np.ones(len(each.tokens) - 1)) for each in answers)
    (result,) = train(training, [learn(data, backward=False)])
    for each, ours, theirs in zip(answers, trainer_logprobs(adapted, answers), logprobs(result), strict=True):
        assert np.array_equal(ours, theirs[len(each.prompt) - 1 :])


def test_many_short_sequences_make_passes_of_no_more_rows_than_one_of_training_has():
    # Of 5 tokens and 8 rows each.
    answers = [Sampled(tokens=(1, 2, 3, 4, each), logprobs=Array.of(np.zeros(1, np.float32))) for each in range(130)]
    assert [len(part) for part in trainer_passes(model(), answers)] == [rows_at_once(64) // 8, 130 - rows_at_once(64) // 8]


def test_answers_come_in_the_order_of_the_prompts_with_all_their_samples():
    answers = sample(model(), SHORT, 4, Form())
    assert [each.prompt for each in answers] == [SHORT[0].tokens, *[SHORT[1].tokens] * 3]
    assert {each.logprobs.shape for each in answers} == {(4,)}
    assert len({each.tokens for each in answers[1:]}) == 3


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"experts": True}], ids=["dense", "half", "experts"])
def test_one_model_passes_the_card_to_the_bit(options):
    right = model(**options)._replace(adapter=adapter(decoder(**options), 1))
    card = measure(right, right, prompts(TEXT, 1024, 6, (3, 17, 510)), 6, "exact")
    assert (card.verdict, card.k3, card.max_abs, card.bit_equal, card.first_difference) == ("pass", 0.0, 0.0, 1.0, None)
    assert (card.sequences, card.tokens, card.dtype) == (6, 36, str(right.decoder.dtype).removeprefix("torch."))


def test_the_form_that_the_probe_has_found_passes_to_the_bit():
    right = model()
    probed = probe(right.decoder)
    assert probed.bit_exact
    assert measure(right, right, prompts(TEXT, 1024, 6, (3, 17, 510)), 6, "exact", probed.form).verdict == "pass"


def test_a_sampler_that_rounds_otherwise_passes_the_plain_bar_and_not_the_exact_one():
    right, nearly = model(), altered("layers.1.qkv", 1 + 2**-20)
    asked = prompts(TEXT, 1024, 12, (3, 17, 60))
    plain, exact = (measure(right, nearly, asked, 12, mode, plain_form(nearly.decoder)) for mode in ("plain", "exact"))
    assert (plain.verdict, plain.first_difference) == ("pass", None)
    assert exact.k3 == plain.k3 > 0
    assert exact.verdict == "fail"
    assert exact.first_difference is not None


@pytest.mark.parametrize("packed", [False, True])
def test_a_difference_is_found_in_packed_weights_too(packed):
    card = measure(model(), altered("layers.1.qkv"), SHORT, 4, "exact", Form(packed=packed))
    assert card.first_difference == "layer 1, attention, from position 0 on"


class OtherHead(Forward):
    @property
    def head_weight(self):
        return super().head_weight * 1.01


class OtherInCompany(Forward):
    def hidden(self, tokens_R, positions_R, attention, adapters, routing=None, wanted=None):
        hidden_RD = super().hidden(tokens_R, positions_R, attention, adapters, routing, wanted)
        return hidden_RD * 1.01 if isinstance(attention, StepAttention) and len(tokens_R) > ROW_PAD else hidden_RD


def altered(name: str, factor: float = 1.01, *, experts: bool = False) -> Model:
    wrong = model(experts=experts)
    dict(wrong.decoder.named_parameters())[name].mul_(factor)
    return wrong


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (altered("embedding"), "embedding, from position 0 on"),
        (altered("layers.1.qkv"), "layer 1, attention, from position 0 on"),
        (altered("layers.0.mlp.down"), "layer 0, mlp, from position 0 on"),
        (altered("layers.1.mlp.router", experts=True), "layer 1, mlp, from position 0 on"),
        (altered("norm"), "last norm, from position 0 on"),
        (Model("m", OtherHead(decoder()), None), "head, from position"),
        (model()._replace(adapter=adapter(decoder(), 1)), "layer 0, attention, from position 0 on"),
    ],
    ids=["embedding", "attention", "mlp", "router", "norm", "head", "adapter"],
)
def test_the_card_names_the_lowest_place_that_differs(wrong, says):
    right = model(experts=wrong.decoder.config.experts is not None)
    card = measure(right, wrong, SHORT, 4, "exact")
    assert card.verdict == "fail"
    assert card.bit_equal < 1
    assert card.first_difference.startswith(says)


def test_what_differs_in_company_alone_is_said_to():
    crowd = [Prompt(tuple(TEXT[:9]), 6, 0, late=False)]
    card = measure(model(), Model("m", OtherInCompany(decoder()), None), crowd, 4, "exact")
    assert (card.verdict, card.first_difference) == ("fail", NOT_HERE)
