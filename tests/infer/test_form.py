"""The forms in which the sampler computes: the fast exact one has the trainer's bits, and plain ones the same distribution."""

import copy

import numpy as np
import pytest
import torch

from bloomery.infer.packing import Packing
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form, plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.packed import pack, packed_bytes
from bloomery.models.pads import KEY_PAD
from bloomery.models.products import can_pack, is_packed, product
from bloomery.types.generation import Generate, Weights
from tests.infer.builders import Adapters, adapter, full_logprobs, generate, naive, prompt, request
from tests.train.builders import decoder

LENGTHS = (3, 31, 60, 127, 128, 190, 191, 200, 300, 383, 450, 511, 513, 640, 700, 720)
FINE = (32, 64, 96, 128, 160, 192, 384, 448, KEY_PAD)
PACKS = can_pack(torch.float32, torch.device("cpu"))


def mixed(max_tokens: int = 6) -> list[Generate]:
    versions = ("base", "v0", "v1", "whole")
    return [request(f"r{length}", prompt(length), version=versions[n % 4], seed=n, max_tokens=max_tokens) for n, length in enumerate(LENGTHS)]


def halved(model: Decoder) -> Decoder:
    """Another whole model."""
    model.layers[0].o.mul_(0.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_probed_form_has_the_bits_of_a_whole_forward_per_token(dtype):
    model, other = decoder(dtype=dtype), halved(decoder(dtype=dtype))
    weights = {"v0": adapter(model, 0), "v1": adapter(model, 1), "whole": other}
    form = probe(model).form
    together = generate(Sampler(model, Adapters(model, weights), form=form), *mixed())
    for each in mixed():
        found = weights.get(each.weights.version)
        of, with_adapter = (other, None) if found is other else (model, found)
        tokens, logprobs = naive(of, each.prompt.numpy().tolist(), each.params, with_adapter)
        assert together[each.request_id].tokens == {0: tokens}, each.request_id
        assert together[each.request_id].logprobs == {0: logprobs}, each.request_id


def test_chunks_of_prompts_keep_the_probed_forms_bits():
    model = decoder()
    ask = request("r", prompt(700), max_tokens=2, asked={"prompt_logprobs": True})
    tight = Limits(slots=3, token_budget=75)
    answer = generate(Sampler(model, Adapters(model), tight, form=probe(model).form), ask)["r"]
    assert np.array_equal(answer.score.logprobs.numpy()[1:], full_logprobs(model, prompt(700), None))


def test_a_plain_form_samples_from_the_same_distribution_up_to_rounding():
    model = decoder()
    weights = {"v0": adapter(model, 0), "v1": adapter(model, 1), "whole": halved(decoder())}
    answers = generate(Sampler(model, Adapters(model, weights), form=plain_form(model)), *mixed())
    for each in mixed():
        found = weights.get(each.weights.version)
        of, with_adapter = (found, None) if each.weights.version == "whole" else (model, found)
        tokens, start = [*each.prompt.numpy().tolist(), *answers[each.request_id].tokens[0]], each.prompt.shape[0] - 1
        # float32 sums in other orders, through two layers.
        np.testing.assert_allclose(answers[each.request_id].logprobs[0], full_logprobs(of, tokens, with_adapter)[start:], atol=2e-4)


def test_keys_are_padded_to_the_next_number_that_the_form_allows():
    form = Form(key_pads=FINE)
    assert [form.keys(length) for length in (1, 32, 33, 193, 384, 512, 513, 705, 1024)] == [32, 32, 64, 384, 384, 512, 544, 896, 1024]
    assert [Form().keys(length) for length in (1, 512, 513)] == [512, 512, 1024]


def test_the_probe_refuses_numbers_of_keys_that_change_bits():
    """On machines whose kernel sums over keys in blocks of unequal size; on others it may allow more."""
    model = decoder()
    form = probe(model).form
    assert form.exact
    assert form.key_pads[-1] == KEY_PAD
    assert list(form.key_pads) == sorted(set(form.key_pads))


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
def test_a_twin_shares_all_but_its_matrices_and_gives_the_same_products():
    model = decoder()
    twin = pack(model)
    assert twin.embedding is model.embedding
    assert twin.norm is model.norm
    assert twin.layers[0].attention_norm is model.layers[0].attention_norm
    assert not is_packed(model.layers[0].qkv)
    rows = torch.randn(8, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for ours, theirs in ((twin.layers[1].qkv, model.layers[1].qkv), (twin.head_weight, model.head_weight)):
        assert is_packed(ours)
        torch.testing.assert_close(product(rows, ours), product(rows, theirs))
    matrices = sum(p.nbytes for name, p in model.named_parameters() if p.dim() == 2 and name not in ("embedding", "head"))
    assert packed_bytes(model) == matrices + model.head_weight.nbytes


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
def test_a_whole_model_is_weighed_with_its_packed_matrices_and_its_twin_goes_with_it():
    model, weights = decoder(), {"v0": adapter(decoder(), 0), "whole": halved(decoder())}
    packing = Packing(Adapters(model, weights), model)
    whole, alone = Weights(version="whole", key="k"), sum(parameter.nbytes for parameter in model.parameters())
    assert packing.weigh(Weights(version="v0", key="k")) == 0
    assert packing.weigh(whole) == alone + packed_bytes(model)
    loaded = packing.load(whole).decoder
    assert packing.twin(loaded) is packing.twin(loaded)
    assert packing.twin(packing.load(Weights(version="v0", key="k")).decoder) is packing.twin(model)


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
@pytest.mark.parametrize("experts", [False, True])
def test_a_sampler_that_is_alone_holds_no_plain_matrices_and_gives_the_same_bits(experts):
    weights = {"whole": halved(decoder(experts=experts))}
    asks = [
        request(f"{version} {length}", prompt(length), version=version, seed=length, max_tokens=5)
        for length in (9, 130)
        for version in ("base", "whole")
    ]
    asks.append(request("scored", prompt(90), max_tokens=2, asked={"prompt_logprobs": True}))
    found = []
    for alone in (False, True):
        model, source = decoder(experts=experts), Adapters(decoder(), {"whole": copy.deepcopy(weights["whole"])})
        source.decoder = model
        found.append(generate(Sampler(model, source, form=Form(packed=True), alone=alone), *asks))
        held = [*model.layers.parameters(), *source.by_version["whole"].layers.parameters()]
        assert alone == all(is_packed(parameter) for parameter in held if parameter.dim() > 1 and len(parameter) > 4)
    together, one = ({name: answer.told for name, answer in each.items()} for each in found)
    for name, answer in together.items():
        assert (answer.tokens, answer.logprobs) == (one[name].tokens, one[name].logprobs)
    assert np.array_equal(together["scored"].score.logprobs.numpy()[1:], one["scored"].score.logprobs.numpy()[1:])


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
def test_experts_are_packed_one_by_one():
    model = decoder(experts=True)
    twin = pack(model)
    assert [is_packed(matrix) for matrix in twin.layers[1].mlp.gate_up] == [True] * 4
    assert model.layers[1].mlp.gate_up.dim() == 3
    assert pack(twin) is twin
    assert packed_bytes(model) > model.layers[1].mlp.gate_up.nbytes + model.layers[1].mlp.down.nbytes
