"""The probe finds kernels that depend on their company, for every shape that is computed with. Bad kernels are torch's own, made worse."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.models.config import ExpertsConfig, LayerHeads
from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe import probe
from bloomery.models.native import attention, bindings, gemm
from bloomery.models.pads import ROW_PAD
from bloomery.models.products import can_pack, is_packed
from tests.train.builders import decoder

PACKS = can_pack(torch.float32, torch.device("cpu"))


def with_two_kinds_of_heads() -> Decoder:
    """Layers of two key heads of 16, and of one of 32."""
    config = dataclasses.replace(decoder().config, head_dim=32, layer_heads=(LayerHeads(2, 16), LayerHeads(1, 32)))
    model = Decoder(config, dtype=torch.float32).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (1, 32)])
def test_attention_is_probed_with_the_heads_of_every_layer(monkeypatch, kv_heads, head_dim):
    monkeypatch.setattr(attention, "attends", lambda *tensors: False)
    assert probe(with_two_kinds_of_heads()).bit_exact
    attend = F.scaled_dot_product_attention

    def worse(query, key, value, **options):
        """Rounds otherwise for few queries of these heads."""
        out = attend(query, key, value, **options)
        return out * (1 + 2**-20) if (key.shape[1], key.shape[3]) == (kv_heads, head_dim) and query.shape[2] < 16 else out

    monkeypatch.setattr(F, "scaled_dot_product_attention", worse)
    assert_found(kv_heads, head_dim)


@pytest.mark.skipif(not bindings.present(), reason="this machine has no C compiler, or not Linux")
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (1, 32)])
def test_native_attention_is_probed_with_the_heads_of_every_layer(monkeypatch, kv_heads, head_dim):
    assert probe(with_two_kinds_of_heads()).bit_exact
    attend = attention.attend

    def worse(q_RHE, keys, values, spans, *options):
        """Rounds otherwise where there are single queries of these heads."""
        out_RHE, logs_RH = attend(q_RHE, keys, values, spans, *options)
        steps = spans.tokens == len(spans.places_N4) > 1
        return out_RHE * (1 + 2**-20) if (keys.shape[1], keys.shape[2]) == (kv_heads, head_dim) and steps else out_RHE, logs_RH

    monkeypatch.setattr(attention, "attend", worse)
    assert_found(kv_heads, head_dim)


def assert_found(kv_heads: int, head_dim: int) -> None:
    failures = probe(with_two_kinds_of_heads()).failures
    assert failures
    assert all(f"attention of {kv_heads} key heads of {head_dim} " in failure for failure in failures)


def with_sigmoid_experts(dtype: torch.dtype) -> Decoder:
    experts = ExpertsConfig(num_experts=4, top_k=2, intermediate_size=32, normalise_top_k=True, sparse_layers=(1,), scoring="sigmoid")
    model = Decoder(dataclasses.replace(decoder().config, experts=experts), dtype=dtype).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def make_worse(monkeypatch: pytest.MonkeyPatch, worsen: Callable[[Tensor, Tensor], None]) -> None:
    """Products go through `worsen`, which gets the answer and the weight, whoever computes those of float32 here."""
    kernels: list[tuple[object, str]] = [(torch.ops.mkldnn, "_linear_pointwise")] if PACKS else [(F, "linear")]
    if gemm.multiplies(torch.empty(0)):
        kernels = [(gemm, "product"), (gemm, "product_unpacked")]
    for module, name in kernels:
        multiply = getattr(module, name)

        def worse(input_RI: Tensor, weight: Tensor, *options: object, multiply: Callable[..., Tensor] = multiply) -> Tensor:
            out_RO = multiply(input_RI, weight, *options)
            worsen(out_RO, weight)
            return out_RO

        monkeypatch.setattr(module, name, worse)


def test_a_router_that_multiplies_in_float32_is_probed_in_it(monkeypatch):
    def worsen(out_RO, weight):
        """Rounds otherwise in float32, for few rows."""
        if out_RO.dtype == torch.float32 and len(out_RO) == 12:
            out_RO *= 1 + 2**-20

    make_worse(monkeypatch, worsen)
    assert probe(with_sigmoid_experts(torch.bfloat16)).failures == ("the product with `layers.1.mlp.router` [4, 64] depends on the number of rows",)


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
@pytest.mark.parametrize("rows", [4, 64, 260, 700])
def test_packed_weights_are_probed_with_as_many_rows_as_a_chunk_of_prompts_has(monkeypatch, rows):
    assert probe(decoder()).form.packed

    def worsen(out_RO, weight):
        """Rounds otherwise behind so many rows."""
        if is_packed(weight):
            out_RO[rows - 1 :] *= 1 + 2**-20

    make_worse(monkeypatch, worsen)
    report = probe(decoder())
    assert report.bit_exact, "plain weights are as good as before"
    assert not report.form.packed


@pytest.mark.skipif(not PACKS, reason="nothing packs here")
def test_a_product_whose_later_rows_depend_on_their_number_is_found(monkeypatch):
    def worsen(out_RO, weight):
        """Rounds the ninth row otherwise where it is among the last."""
        if len(out_RO) == 12:
            out_RO[8] *= 1 + 2**-20

    make_worse(monkeypatch, worsen)
    assert any("depends on the number of rows" in failure for failure in probe(decoder()).failures)


@pytest.mark.skipif(not gemm.multiplies(torch.empty(0)), reason="no native products here")
def test_rows_need_no_pads_where_one_alone_has_its_bits(monkeypatch):
    assert probe(decoder()).form.row_pad == 1

    def worsen(out_RO, weight):
        """Rounds otherwise for a single row."""
        if len(out_RO) == 1:
            out_RO *= 1 + 2**-20

    make_worse(monkeypatch, worsen)
    report = probe(decoder())
    assert report.bit_exact, "four rows are as good as before"
    assert report.form.row_pad == ROW_PAD
