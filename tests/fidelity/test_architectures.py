"""Every architecture passes its card after training, and every planted bug fails it."""

import pytest
import torch

from bloomery.infer.card import TRAINERS, card, measure
from bloomery.infer.fidelity import sample, trainer_logprobs
from bloomery.models.families import FAMILIES
from bloomery.models.kernel_probe import probe
from bloomery.models.products import library
from bloomery.types.fidelity import PLAIN_K3, compare
from tests.fidelity.instances import MAX_TOKENS, adapted, asked, rounded, trained
from tests.fidelity.mutations import MUTATIONS, Mutation
from tests.fidelity.page import PAGE


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_trained_instance_passes_to_the_bit(architecture):
    instance = trained(architecture)
    assert instance.losses[-1] < instance.losses[0] / 3
    card = measure(instance.model, instance.model, asked(), MAX_TOKENS, "exact", probe(instance.decoder).form)
    assert (card.verdict, card.max_abs, card.first_difference) == ("pass", 0.0, None)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_trained_adapter_passes_to_the_bit(architecture):
    instance = adapted(architecture)
    assert instance.losses[-1] < instance.losses[0] / 2
    model, form = instance.model(), probe(instance.base).form
    answers = sample(model, asked(), MAX_TOKENS, form)
    passed = card(model, model, answers, trainer_logprobs(model, answers), "exact", form)
    assert (passed.verdict, passed.max_abs, passed.first_difference) == ("pass", 0.0, None)
    # It is the adapter that was measured: a trainer without it is far off.
    assert compare(answers, trainer_logprobs(model._replace(adapter=None), answers)).k3 > PLAIN_K3


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_half_precision_is_held_to_what_the_probe_promises(architecture):
    instance = rounded(architecture)
    promised = probe(instance.decoder)
    # With some processors' instructions for it products depend on the number of rows: the probe must see that, and rounding is not refused then.
    exact = promised.bit_exact
    card = measure(instance.model, instance.model, asked(), MAX_TOKENS, "exact" if exact else "plain", promised.form)
    assert (card.dtype, card.verdict, card.first_difference) == ("bfloat16", "pass", None)
    # Tiles of our own are made for it.
    assert exact or library(torch.bfloat16, instance.decoder.device) != "native", promised.failures


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True], ids=["padded", "as served"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug)
def test_a_planted_bug_fails_the_card_and_is_placed(mutation: Mutation, served: bool):
    right = mutation.model()
    card = measure(right, mutation.sampler(right), asked(), MAX_TOKENS, "exact", probe(right.decoder).form if served else TRAINERS)
    assert card.verdict == "fail"
    assert card.first_difference is not None
    assert card.first_difference.startswith(mutation.place)
    if mutation.seen_by_k3:
        assert card.k3 > PLAIN_K3


def test_the_page_has_every_architecture_and_every_bug():
    page = PAGE.read_text()
    assert [family for family in FAMILIES if f"| {family} |" not in page] == []
    assert [mutation.bug for mutation in MUTATIONS if f"| {mutation.bug} |" not in page] == []
