"""The one list of tensors: it is what `transformers` saves, it is what the loader fills, and what deviates from it is named before anything loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bloomery.models.config import DecoderConfig
from bloomery.models.decoder import Decoder
from bloomery.models.families import read_config
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.models.names import stored_places
from bloomery.models.products import MATRICES
from bloomery.models.weight_files import check_weights
from bloomery.types.errors import InvalidInput
from tests.models.builders import MODELS, reference, saved

QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("family", MODELS)
def test_the_list_is_what_transformers_saves(family: str, tmp_path: Path) -> None:
    config = read_config(saved(family, tmp_path))
    theirs = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: place.shape for name, place in stored_places(config)} == theirs
    assert check_weights(tmp_path, config) == sum(tensor.numel() for tensor in reference(family).state_dict(keep_vars=True).values()) - tied(config)


def tied(config: DecoderConfig) -> int:
    """Numbers of the head that is the embedding."""
    return config.vocab_size * config.hidden_size if config.tied_head else 0


@pytest.mark.parametrize("family", MODELS)
def test_every_place_of_the_decoder_is_filled_by_one_tensor(family: str, tmp_path: Path) -> None:
    decoder = load_decoder(saved(family, tmp_path), dtype=torch.float32)
    views = stored_tensors(decoder)
    assert {name: tuple(view.shape) for name, view in views.items()} == {name: place.shape for name, place in stored_places(decoder.config)}
    for view in views.values():
        view.add_(1.0)
    untouched = load_decoder(tmp_path, dtype=torch.float32)
    for (name, changed), (_, before) in zip(decoder.named_parameters(), untouched.named_parameters(), strict=True):
        assert torch.equal(changed, before + 1.0), name


@pytest.mark.parametrize("family", MODELS)
def test_the_probe_and_the_packed_form_know_every_matrix(family: str, tmp_path: Path) -> None:
    decoder = Decoder(read_config(saved(family, tmp_path)), dtype=torch.float32, device="meta")
    found = {name.rpartition(".")[2] for name, parameter in decoder.named_parameters() if parameter.dim() > 1}
    # Tables are looked up in, the head is told apart, and the others are summed without a product.
    assert found <= MATRICES | {"embedding", "head", "conv", "shared_gate"}


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


def transpose(tensors: dict[str, Tensor]) -> None:
    tensors[QUERY] = tensors[QUERY][:-1].contiguous()


def add_bias(tensors: dict[str, Tensor]) -> None:
    tensors[QUERY.replace("weight", "bias")] = torch.zeros(64)


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors[QUERY] = tensors[QUERY].to(torch.int8)


def change_the_prefix(tensors: dict[str, Tensor]) -> None:
    renamed = {name.replace("model.", "language_model."): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(renamed)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (drop, rf"model\.safetensors lacks `{NORM}`\. Copy"),
        (transpose, rf"`{QUERY}` in model\.safetensors has shape \[63, 64\], not \[64, 64\]"),
        (add_bias, r"q_proj\.bias` in model\.safetensors is no tensor of a llama model"),
        (quantise, rf"`{QUERY}` in model\.safetensors holds I8 numbers: save the model in bf16"),
        (change_the_prefix, r"lacks `model\.embed_tokens\.weight`; .* lacks `model\.layers\.0.*`; .* lacks [^;]*$"),
    ],
)
def test_the_loader_and_the_check_before_it_name_the_tensor_and_its_file(
    damage: Callable[[dict[str, Tensor]], None], complaint: str, tmp_path: Path
) -> None:
    weights = saved("llama", tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    damage(tensors)
    save_file(tensors, weights)
    with pytest.raises(InvalidInput, match=complaint):
        check_weights(tmp_path, read_config(tmp_path))
    with pytest.raises(InvalidInput, match=complaint):
        load_decoder(tmp_path, dtype=torch.float32)


def test_a_tensor_that_its_shard_lacks_is_looked_for_where_the_index_puts_it(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_size="50KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / index[QUERY]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != QUERY}, shard)
    with pytest.raises(InvalidInput, match=rf"{shard.name} lacks `{QUERY}`"):
        check_weights(tmp_path, read_config(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidInput, match=rf"each of the \d+ weight files lacks `{QUERY}`"):
        check_weights(tmp_path, read_config(tmp_path))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    weights = saved("llama", tmp_path) / "model.safetensors"
    weights.rename(tmp_path / "one.safetensors")
    save_file({NORM: torch.ones(64)}, tmp_path / "two.safetensors")
    with pytest.raises(InvalidInput, match=rf"`{NORM}` is in one\.safetensors and in two\.safetensors: remove one"):
        check_weights(tmp_path, read_config(tmp_path))


def test_what_old_files_hold_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    weights = saved("qwen3", tmp_path) / "model.safetensors"
    before = load_decoder(tmp_path, dtype=torch.float32)
    tensors = load_file(weights) | {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, weights)
    after = load_decoder(tmp_path, dtype=torch.float32)
    assert before.config.tied_head
    assert torch.equal(after.embedding, before.embedding)
    assert check_weights(tmp_path, after.config) == reference("qwen3").num_parameters()
