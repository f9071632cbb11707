"""Steps that programs compute have the bits of those that are computed call by call, whoever comes, goes, or is given other weights meanwhile."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from bloomery.infer.plan import Limits
from bloomery.infer.recorded import FEW_ROWS, MAX_KEPT, _Memory, _Recorded
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.mlp import Mlp
from bloomery.models.native import gemm
from bloomery.models.pads import BLOCK_PLACES
from bloomery.models.pointwise import add
from bloomery.types.generation import Weights
from tests.infer.builders import Adapters, adapter, answers, drain, generate, naive, prompt, request
from tests.train.builders import decoder

pytestmark = pytest.mark.skipif(not gemm.multiplies(torch.empty(0)), reason="no native products here")
FORM = Form(row_pad=1, packed=True)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")])]


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture(scope="module")
def adapters(model):
    return {f"v{seed}": adapter(model, seed) for seed in range(3)}


def sampler(model, adapters=None, limits=None, form=FORM):
    return Sampler(model, Adapters(model, adapters), limits, form=form)


def call_by_call(model, adapters, limits=None):
    """A sampler that computes without packed matrices, and without programs."""
    made = sampler(model, adapters, limits, Form())
    made._runner._recorded._unrecordable.add(model)
    return made


def replayed(engine: Sampler) -> int:
    return engine._runner._recorded.replayed


def as_naive(model, adapters, each, answer):
    tokens, logprobs = naive(model, each.prompt.numpy().tolist(), each.params, adapters.get(each.weights.version))
    return (answer.tokens, answer.logprobs) == ({0: tokens}, {0: logprobs})


def test_many_tenants_that_come_and_go_get_the_bits_of_whole_forwards(model, adapters):
    versions = ("base", "v0", "v1", "v2", "v0")
    requests = [request(f"r{n}", prompt(5 + 7 * n), version=versions[n % 5], seed=n, max_tokens=9 + 4 * n) for n in range(8)]
    engine = sampler(model, adapters)
    together = generate(engine, *requests)
    assert replayed(engine) > 10
    assert all(as_naive(model, adapters, each, together[each.request_id]) for each in requests)


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"qk_norm": False}, {"windows": (24, None)}, {"tied_head": False}], ids=str)
def test_dense_models_of_every_kind_are_recorded(changes):
    other = Decoder(replace(decoder().config, **changes), dtype=torch.float32).requires_grad_(False)
    for name, parameter in other.named_parameters():
        parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.15)
    engine, each = sampler(other), request("r", prompt(40), max_tokens=12)
    assert as_naive(other, {}, each, generate(engine, each)["r"])
    assert replayed(engine) > 5


def test_a_longer_sequence_than_the_cache_had_room_for_moves_it_and_goes_on(model):
    engine = sampler(model)
    each = request("long", prompt(500), max_tokens=40)
    assert as_naive(model, {}, each, generate(engine, each)["long"])
    assert replayed(engine) > 20


def test_storage_that_moves_again_and_again_under_a_sequence_without_room_is_found(model):
    engine = sampler(model, limits=Limits(slots=2, token_budget=64, cache_tokens=2 * BLOCK_PLACES))
    each = request("r", prompt(40), max_tokens=190)
    assert as_naive(model, {}, each, generate(engine, each)["r"])
    assert replayed(engine) > 90


def test_preempted_and_forked_samples_too(model, adapters):
    requests = [request("group", prompt(450), version="v1", num_samples=5, max_tokens=60, seed=4), request("other", prompt(30), max_tokens=60)]
    engine = sampler(model, adapters, Limits(slots=4, token_budget=64))
    plain = call_by_call(model, adapters, Limits(slots=4, token_budget=64))
    assert generate(engine, *requests)["group"].told == generate(plain, *requests)["group"].told
    assert replayed(engine) > 20
    assert replayed(plain) == 0


STEPS = 12
"""Of a request that has as many tokens: the first two of an own composition are computed call by call."""


def replayed_in_turn(engine, *versions):
    """Steps of a request of each version that programs compute."""
    found = []
    for version in versions:
        before = replayed(engine)
        generate(engine, request(f"{version} of {len(found)}", prompt(11), version=version, max_tokens=STEPS))
        found.append(replayed(engine) - before)
    return found


def whole(seed):
    other = decoder()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in other.named_parameters():
        parameter.uniform_(0.5, 1.5, generator=generator) if "norm" in name else parameter.normal_(std=0.15, generator=generator)
    return other


@pytest.mark.parametrize("build", [adapter, lambda _, seed: whole(seed)], ids=["adapters", "whole models"])
def test_new_weights_in_the_layout_of_others_are_computed_by_their_programs_from_the_first_step_on(model, build):
    new = {f"v{seed}": build(model, seed) for seed in range(4)}
    engine, alone = sampler(model, new), {version: sampler(model, {version: own}) for version, own in new.items()}
    together = {}
    for version in new:
        before = replayed(engine)
        each = request(version, prompt(11), version=version, max_tokens=STEPS)
        together |= generate(engine, each)
        # From the third on its prefill too.
        assert replayed(engine) - before == {"v0": STEPS - 2, "v1": STEPS}.get(version, STEPS + 1)
        assert together[version] == generate(alone[version], each)[version]
    assert len({tuple(answer.tokens[0]) for answer in together.values()}) > 1


def test_a_program_that_came_no_third_time_is_proved_by_the_next_version_that_it_is_moved_to(model):
    new = {f"v{seed}": adapter(model, seed) for seed in range(5)}
    engine, found = sampler(model, new), []
    for version, own in new.items():
        before, each = replayed(engine), request(version, prompt(11), version=version, max_tokens=2)
        assert as_naive(model, {version: own}, each, generate(engine, each)[version])
        found.append(replayed(engine) - before)
    assert found == [0, 2, 3, 3, 3]


def test_who_shares_a_step_in_another_way_or_has_another_rank_is_recorded_anew(model):
    engine = sampler(
        model, {"v0": adapter(model, 0), "v1": adapter(model, 1), "narrow": adapter(model, 2, rank=4), "wide": adapter(model, 2, rank=40)}
    )
    assert replayed_in_turn(engine, "v0", "v1", "wide", "base") == [STEPS - 2, STEPS, STEPS - 2, STEPS - 2]
    # The padded factors are as large, and what is joined in them lies elsewhere.
    assert replayed_in_turn(engine, "narrow") == [STEPS - 2]
    requests = [request(f"{version} beside", prompt(9 + place), version=version, max_tokens=9) for place, version in enumerate(("v0", "v1"))]
    before = replayed(engine)
    generate(engine, *requests)
    assert replayed(engine) - before < 8


class ForgetfulAdapter(FusedAdapter):
    """Says of one factor too few that it is computed with."""

    @property
    def tensors(self):
        return super().tensors[1:]


def test_a_program_that_was_moved_wrongly_is_found_out_before_anybody_gets_its_answer(model, caplog):
    new = {f"v{seed}": adapter(model, seed) for seed in range(2)}
    for each in new.values():
        each.__class__ = ForgetfulAdapter
    engine = sampler(model, new)
    assert replayed_in_turn(engine, "v0") == [STEPS - 2]
    each = request("r", prompt(11), version="v1", max_tokens=STEPS)
    assert as_naive(model, new, each, generate(engine, each)["r"])
    assert "call by call" in caplog.text


def test_weights_that_lie_where_other_numbers_of_a_program_may_move_none(model):
    memory = _Memory.of([adapter(model, 0)])
    assert memory.may_become(_Memory.of([adapter(model, 1)]))
    assert not memory.may_become(_Memory.of([adapter(model, 1, rank=40)]))
    low = memory._replace(places=tuple((start % 2**31, size_bytes) for start, size_bytes in memory.places))
    assert not low.may_become(_Memory.of([adapter(model, 1)]))


@pytest.mark.slow
def test_weights_that_are_gone_leave_no_program_to_those_that_take_their_place(model):
    """With room for one version each is loaded anew, and Python gives the new object the old one's place."""
    first, second = adapter(model, 1), adapter(model, 2)

    class Loading(Adapters):
        def load(self, weights: Weights):
            found = super().load(weights)
            return found if found.adapter is None else found._replace(adapter=found.adapter.copy())

    engine = Sampler(model, Loading(model, {"v1": first, "v2": second}), form=FORM, versions_in_memory=1)
    for turn in range(4):
        for version, own in (("v1", first), ("v2", second)):
            each = request(f"{version}-{turn}", prompt(11), version=version, max_tokens=6)
            assert as_naive(model, {version: own}, each, generate(engine, each)[each.request_id])
            gc.collect()


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_that_nobody_holds_any_more_are_kept_alive_by_no_step(device):
    model = decoder().to(device)
    loaded = []

    class Loading(Adapters):
        def load(self, weights: Weights):
            found = super().load(weights)
            own = found._replace(adapter=found.adapter.copy())
            loaded.append(weakref.ref(own.adapter))
            return own

    # Only processors have a packed order.
    form = FORM._replace(packed=device == "cpu")
    engine = Sampler(model, Loading(model, {name: adapter(model, seed) for seed, name in enumerate("abc")}), form=form, versions_in_memory=2)
    generate(engine, *(request(name, prompt(11), version=name, max_tokens=9) for name in "ab"))
    assert replayed(engine) > 2
    for name in ("c", "a"):
        generate(engine, request(f"{name} again", prompt(11), version=name, max_tokens=2))
    gc.collect()
    assert [each() is None for each in loaded[:2]] == [True, True]


def test_another_number_of_threads_is_another_program(model):
    engine, before = sampler(model), torch.get_num_threads()
    each = request("r", prompt(12), max_tokens=30)
    engine.submit(each)
    events = []
    try:
        while engine.busy:
            torch.set_num_threads(1 + len(events) // 6 % 2)
            events += engine.step()
    finally:
        torch.set_num_threads(before)
    assert as_naive(model, {}, each, answers(events)["r"])
    assert replayed(engine) > 10


@pytest.mark.parametrize("build", [lambda: decoder(experts=True), lambda: decoder(dtype=torch.bfloat16)], ids=["experts", "bfloat16"])
def test_what_has_no_kernels_of_ours_is_computed_call_by_call(build):
    engine = Sampler(build(), Adapters(build()), form=Form(row_pad=1))
    assert len(generate(engine, request("r", prompt(12), max_tokens=8))["r"].tokens[0]) == 8
    assert replayed(engine) == 0


@pytest.mark.parametrize("length", [3, 11, 12, 37, FEW_ROWS, FEW_ROWS + 1])
def test_prefills_of_few_rows_are_recorded_and_longer_ones_are_not(model, adapters, length):
    engine = sampler(model, adapters)
    for turn in range(5):
        # Of one token, for which the last of the prompt is prefilled too.
        before, each = replayed(engine), request(f"r{turn}", prompt(length, seed=turn), version=f"v{turn % 2}", max_tokens=1)
        assert as_naive(model, adapters, each, generate(engine, each)[f"r{turn}"])
        assert replayed(engine) - before == (turn > 1 and length <= FEW_ROWS)


def test_prefills_of_several_and_of_which_some_rows_are_wanted_too(model, adapters):
    engine, plain = sampler(model, adapters), call_by_call(model, adapters)
    for turn in range(4):
        requests = [
            request(
                f"r{turn}.{n}",
                prompt(9 + 8 * n, seed=5 * turn + n),
                version=f"v{n % 2}",
                max_tokens=2,
                asked={"prompt_logprobs": n == 1},
            )
            for n in range(3)
        ]
        assert generate(engine, *requests) == generate(plain, *requests)
    assert replayed(engine) >= 4
    assert replayed(plain) == 0


def test_a_prefill_whose_program_leaves_no_keys_is_found_out_before_anybody_reads_them(model, monkeypatch, caplog):
    engine = sampler(model)
    for turn in range(3):
        each = request(f"r{turn}", prompt(12, seed=turn), max_tokens=4)
        if turn == 2:
            monkeypatch.setattr(_Recorded, "again", lambda self, *step: self.hidden_RD)
        assert as_naive(model, {}, each, generate(engine, each)[f"r{turn}"])
    assert "call by call" in caplog.text


class PeekingMlp(Mlp):
    """Adds a number that it read past torch's dispatcher."""

    def forward(self, x_RD, name, adapters):
        self.read = torch.from_numpy(np.full(x_RD.shape[1], x_RD.numpy()[0, 0]))
        return add(super().forward(x_RD, name, adapters), self.read)


def test_a_program_that_has_frozen_a_number_is_found_out_before_anybody_gets_its_answer(caplog):
    frozen = decoder()
    frozen.layers[0].mlp.__class__ = PeekingMlp
    engine, other = (Sampler(frozen, Adapters(frozen), form=FORM) for _ in range(2))
    other._runner._recorded._unrecordable.add(other._runner._twin(frozen))
    each = request("r", prompt(12), max_tokens=20)
    assert generate(engine, each) == generate(other, each)
    assert replayed(engine) == 1
    assert "call by call" in caplog.text


def test_few_are_kept_and_none_when_all_is_forgotten(model):
    engine = sampler(model)
    kept = engine._runner._recorded._kept
    for count in range(1, 5):
        generate(engine, request(f"r{count}", prompt(9), num_samples=count, max_tokens=4))
    assert 4 <= len(kept) <= MAX_KEPT
    engine.forget_all()
    assert not kept
    assert drain(engine) == []
