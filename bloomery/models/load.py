"""Build a `Decoder` from a directory that `save_pretrained` wrote: safetensors only, sharded or not, tied or not.

Nothing of the directory is executed and nothing is unpickled.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bloomery.models.config import DecoderConfig, read_config
from bloomery.models.decoder import Decoder
from bloomery.models.weight_files import weight_files
from bloomery.types.errors import InvalidInput


def load_decoder(directory: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The base model in `dtype` on `device`, gradients off; a missing, surplus or misshapen tensor is an error that names it."""
    config = read_config(directory)
    decoder = Decoder(config, dtype=dtype, device=device).requires_grad_(False)
    waiting = stored_tensors(decoder)
    for name, tensor in _tensors(directory):
        if name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight"):
            continue
        target = waiting.pop(name, None)
        if target is None:
            raise InvalidInput(f"unexpected tensor `{name}` for a {config.model_type} model in {directory}", field="model")
        if target.shape != tensor.shape:
            raise InvalidInput(f"tensor `{name}` has shape {list(tensor.shape)}, config.json asks for {list(target.shape)}", field="model")
        target.copy_(tensor)
    if waiting:
        raise InvalidInput(f"{directory} lacks {len(waiting)} tensors, first `{min(waiting)}`", field="model")
    return decoder


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                yield name, file.get_tensor(name)


def stored_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Hugging Face name of every tensor, with the view of ours that it fills."""
    config = decoder.config
    views: dict[str, Tensor] = {"model.embed_tokens.weight": decoder.embedding.data, "model.norm.weight": decoder.norm.data}
    if decoder.head is not None:
        views["lm_head.weight"] = decoder.head.data
    for layer, block in enumerate(decoder.layers):
        prefix, own = f"model.layers.{layer}", dict(block.named_parameters())
        views[f"{prefix}.input_layernorm.weight"] = own["attention_norm"].data
        views[f"{prefix}.post_attention_layernorm.weight"] = own["mlp_norm"].data
        views |= _attention_views(f"{prefix}.self_attn", own, config)
        views |= _mlp_views(f"{prefix}.mlp", own)
    return views


def _attention_views(prefix: str, own: dict[str, torch.nn.Parameter], config: DecoderConfig) -> dict[str, Tensor]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = own["qkv"].data.split([query, key, key])
    views = {f"{prefix}.q_proj.weight": q, f"{prefix}.k_proj.weight": k, f"{prefix}.v_proj.weight": v, f"{prefix}.o_proj.weight": own["o"].data}
    if config.qk_norm:
        views |= {f"{prefix}.q_norm.weight": own["q_norm"].data, f"{prefix}.k_norm.weight": own["k_norm"].data}
    return views


def _mlp_views(prefix: str, own: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    gate_up, down = own["mlp.gate_up"].data, own["mlp.down"].data
    if gate_up.dim() == 2:
        gate, up = gate_up.chunk(2)
        return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up, f"{prefix}.down_proj.weight": down}
    views = {f"{prefix}.gate.weight": own["mlp.router"].data}
    for expert in range(gate_up.shape[0]):
        gate, up = gate_up[expert].chunk(2)
        of = f"{prefix}.experts.{expert}"
        views |= {f"{of}.gate_proj.weight": gate, f"{of}.up_proj.weight": up, f"{of}.down_proj.weight": down[expert]}
    return views
