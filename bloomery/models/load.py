"""Build a `Decoder` from a directory that `save_pretrained` wrote: safetensors only, sharded or not, tied or not.

Nothing of the directory is executed and nothing is unpickled.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.families import read_config
from bloomery.models.names import Place, stored_places
from bloomery.models.weight_files import check_weights, own_name, weight_files
from bloomery.types.errors import InvalidInput


def load_decoder(directory: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The base model in `dtype` on `device`, gradients off; a missing, surplus or misshapen tensor is an error that names it."""
    config = read_config(directory)
    check_weights(directory, config)
    decoder = Decoder(config, dtype=dtype, device=device).requires_grad_(False)
    targets = stored_tensors(decoder)
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if (target := targets.get(own_name(stored))) is not None:
                    target.copy_(file.get_tensor(stored))
    return decoder


def fill(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Give a decoder all its values, by their names in a Hugging Face directory."""
    targets = stored_tensors(decoder)
    if odd := targets.keys() ^ tensors.keys():
        raise InvalidInput(f"{len(odd)} tensors are missing or of another model, first `{min(odd)}`", field="model")
    for name, target in targets.items():
        if (tensor := tensors[name]).shape != target.shape:
            raise InvalidInput(f"tensor `{name}` has shape {list(tensor.shape)}, the model asks for {list(target.shape)}", field="model")
        target.copy_(tensor)


def stored_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Hugging Face name of every tensor, with the view of ours that it fills."""
    ours = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    return {name: _view(ours[place.parameter].data, place) for name, place in stored_places(decoder.config)}


def _view(parameter: Tensor, place: Place) -> Tensor:
    return (parameter if place.expert is None else parameter[place.expert])[place.rows]
