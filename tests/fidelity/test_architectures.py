"""Every architecture passes its card after training, and every planted bug fails it."""

import pytest
import torch

from bloomery.infer.card import TRAINERS, measure
from bloomery.models.families import FAMILIES
from bloomery.models.kernel_probe import probe
from bloomery.types.fidelity import PLAIN_K3
from tests.fidelity.instances import MAX_TOKENS, asked, trained
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
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "kimi_k2", "nemotron_h"])
def test_half_precision_passes_too(architecture):
    instance = trained(architecture, torch.bfloat16)
    assert measure(instance.model, instance.model, asked(), MAX_TOKENS, "exact", probe(instance.decoder).form).verdict == "pass"


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
