"""What the config of a Nemotron says, and what a directory of one holds."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.models.families import parse_config, read_config
from bloomery.models.names import stored_places
from bloomery.models.targets import adapter_targets
from bloomery.models.weight_files import check_weights
from bloomery.services.engines.models import read_size
from bloomery.types.errors import BloomeryError
from tests.models.builders import saved

SUPER: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
}
NANO = SUPER | {
    "hidden_size": 2688,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_latent_size": None,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}


@pytest.mark.parametrize(
    ("config", "layers", "parameters"),
    # Of Nemotron 3 Super 120B, without the layers for further tokens, and of Nemotron 3 Nano 30B, in bfloat16; beside them the routers' biases.
    [(SUPER, 88, 120_668_687_360 + 40 * 512), (NANO, 52, 31_577_937_344 + 23 * 128)],
)
def test_the_published_models_have_as_many_parameters(config: dict[str, Any], layers: int, parameters: int) -> None:
    read = parse_config(config)
    assert read.num_layers == layers
    assert sum(math.prod(place.shape) for _, place in stored_places(read)) == parameters


def test_layers_for_further_tokens_are_passed_over(tmp_path: Path) -> None:
    saved("nemotron_h, latent", tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    parameters = check_weights(tmp_path, read_config(tmp_path))
    save_file(load_file(weights) | {"mtp.layers.0.mixer.q_proj.weight": torch.zeros(64, 64)}, weights)
    with pytest.raises(BloomeryError, match=r"mtp\.layers\.0"):
        check_weights(tmp_path, read_config(tmp_path))
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1'))
    assert check_weights(tmp_path, read_config(tmp_path)) == parameters


def test_adapters_are_on_every_projection_but_the_one_that_peft_refuses(tmp_path: Path) -> None:
    config = read_config(saved("nemotron_h", tmp_path))
    attention = {name.removeprefix("layers.") for name in adapter_targets(config, mlp=False, unembed=False)}
    assert attention == {"0.mixer.in_proj", "3.mixer.in_proj", *(f"2.mixer.{each}_proj" for each in "qkvo")}
    mlp = {name.removeprefix("layers.1.") for name in adapter_targets(config, attention=False, unembed=False) if "layers.1." in name}
    assert mlp == {f"mixer.{module}{name}_proj" for module in ("", "shared_experts.") for name in ("up", "down")}


def test_services_know_that_its_experts_have_shared_ones_beside_them(tmp_path: Path) -> None:
    size = read_size(saved("nemotron_h", tmp_path / "sparse"))
    assert size.partly_dense
    assert size.routing is not None
    assert size.routing.sparse_layers == (1, 4)
    assert not read_size(saved("nemotron_h, dense", tmp_path / "dense")).partly_dense
