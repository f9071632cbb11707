"""Stacked factors that outlive a pass: made once for a company of adapters, and anew for another."""

from weakref import ref

import torch

from bloomery.models.adapters import AdapterRows, adapted_linear
from bloomery.models.bank import _KEPT_PASSES, Bank
from bloomery.models.factors import Factors
from bloomery.models.fused_adapter import FusedAdapter, fuse
from bloomery.models.pads import ROW_PAD
from bloomery.models.targets import Target

TARGET = "layers.0.self_attn.o_proj"


def adapter(seed: int) -> FusedAdapter:
    noise = torch.Generator().manual_seed(seed)
    factors = Factors(torch.randn(16, 32, generator=noise), torch.randn(24, 16, generator=noise))
    return fuse({TARGET: Target("layers.0.o", 24, 0, outputs=24, inputs=32)}, {TARGET: factors}, 1.0)


def rows_of(*adapters: FusedAdapter | None, bank: Bank | None = None) -> AdapterRows:
    segments = tuple((each, ROW_PAD * place, ROW_PAD * (place + 1)) for place, each in enumerate(adapters))
    return AdapterRows(segments, bank)


def test_a_bank_changes_no_bit_whoever_was_together_before():
    bank, adapters = Bank(), [adapter(seed) for seed in range(4)]
    noise = torch.Generator().manual_seed(9)
    x, weight = torch.randn(3 * ROW_PAD, 32, generator=noise), torch.randn(24, 32, generator=noise)
    for company in ((0, 1, 2), (0, 1, 2), (0, 1, 3), (3, 1, 0), (None, 2, 1)):
        members = [None if number is None else adapters[number] for number in company]
        with torch.no_grad():
            banked = adapted_linear(x, weight, "layers.0.o", rows_of(*members, bank=bank))
        plain = adapted_linear(x, weight, "layers.0.o", rows_of(*members))
        assert torch.equal(banked, plain), company


def test_factors_are_stacked_once_for_a_company():
    bank, (first, second, third) = Bank(), (adapter(seed) for seed in range(3))
    together = [each.get("layers.0.o") for each in (first, second)]
    stacked = bank.stacked("layers.0.o", 0, together)
    assert bank.stacked("layers.0.o", 0, together) is stacked
    assert bank.stacked("layers.0.o", 0, [each.get("layers.0.o") for each in (first, third)]) is not stacked


def test_what_was_made_of_an_adapter_goes_with_it_and_the_bank_keeps_none_alive():
    bank, adapters = Bank(), [adapter(seed) for seed in range(2)]
    made = ref(bank.stacked("layers.0.o", 0, [each.get("layers.0.o") for each in adapters]).a)
    gone = ref(adapters[0])
    assert made() is not None
    del adapters[0]
    assert gone() is None
    assert made() is None


def test_what_passes_do_not_use_any_more_goes_and_what_they_use_stays():
    bank, adapters = Bank(), [adapter(seed) for seed in range(4)]
    factors = [each.get("layers.0.o") for each in adapters]
    used, unused = (ref(bank.stacked("layers.0.o", place, factors[2 * place : 2 * place + 2]).a) for place in range(2))
    for _ in range(_KEPT_PASSES):
        bank.begin_pass()
        bank.stacked("layers.0.o", 0, factors[:2])
    assert unused() is not None, "as long as that it may be wanted again"
    bank.begin_pass()
    assert used() is not None
    assert unused() is None
