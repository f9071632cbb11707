"""Which files hold a model's weights, and whether they hold all: headers only, no torch, so that the supervisor can tell before anything loads."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from bloomery.models.config import DecoderConfig
from bloomery.models.families import FAMILIES
from bloomery.models.names import stored_places
from bloomery.types.errors import InvalidInput

_INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = frozenset({"BF16", "F16", "F32", "F64"})
_MAX_HEADER_BYTES: Final = 100 << 20
_KEYS_AND_VALUES: Final = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
_BESIDE_TOWERS: Final = "model.language_model."
_NAMED: Final = 3
"""Tensors that a complaint names."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files in order: those of the index when there is one, else `model.safetensors`, else every one."""
    index = directory / _INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [directory / _plain(name) for name in names]
    elif (directory / "model.safetensors").exists():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise InvalidInput(f"{directory} lacks {missing[0]}, which its index names", field="model")
    if not files:
        raise InvalidInput(_nothing_found(directory), field="model")
    return files


def own_name(name: str) -> str:
    """What a text model calls a tensor: `transformers` saves one that was loaded out of a model with towers under the names it had there."""
    return f"model.{name.removeprefix(_BESIDE_TOWERS)}" if name.startswith(_BESIDE_TOWERS) else name


def check_weights(directory: Path, config: DecoderConfig) -> int:
    """Parameters of the model, when the headers hold every tensor that the config asks for, each in its shape, and no other."""
    found = _stored(directory)
    # Lazily: a config may describe millions of layers, and the first few that are missing say enough.
    problems = list(islice(_unfit(directory, config, found), _NAMED)) or list(islice(_surplus(config, found), _NAMED))
    if problems:
        advice = "Copy the directory again, or correct its config.json"
        raise InvalidInput(f"{directory} does not hold the model of its config.json: {'; '.join(problems)}. {advice}", field="model")
    return sum(math.prod(place.shape) for _, place in stored_places(config))


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES:
            raise InvalidInput(f"{path} is not a safetensors file", field="model")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise InvalidInput(f"{path} has a damaged safetensors header", field="model") from None
    if not isinstance(header, dict):
        raise InvalidInput(f"{path} has a damaged safetensors header", field="model")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if (size := path.stat().st_size) < (expected := len(start) + length + max(ends, default=0)):
        raise InvalidInput(f"{path} is cut off: it has {size} bytes of {expected}; copy it again", field="model")
    return header


class _Tensor(NamedTuple):
    """What a header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def _stored(directory: Path) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    for path in weight_files(directory):
        for stored, entry in read_header(path).items():
            if (name := own_name(stored)) == "__metadata__":
                continue
            if name in found:
                raise InvalidInput(f"{directory}: tensor `{name}` is in {found[name].file} and in {path.name}: remove one", field="model")
            found[name] = _Tensor(path.name, tuple(entry["shape"]), entry["dtype"])
    return found


def _unfit(directory: Path, config: DecoderConfig, found: Mapping[str, _Tensor]) -> Iterator[str]:
    """What is wrong with the tensors that the config asks for."""
    for name, place in stored_places(config):
        tensor = found.get(name)
        if tensor is None:
            yield f"{_file_of(directory, name)} lacks `{name}`"
        elif tensor.shape != place.shape:
            yield f"`{name}` in {tensor.file} has shape {list(tensor.shape)}, not {list(place.shape)}"
        elif tensor.dtype not in _FLOATS:
            yield f"`{name}` in {tensor.file} holds {tensor.dtype} numbers: save the model in bf16, fp16 or fp32"


def _surplus(config: DecoderConfig, found: Mapping[str, _Tensor]) -> Iterator[str]:
    expected = {name for name, _ in stored_places(config)}
    further = range(config.num_layers, config.num_layers + config.passed_over_layers)
    prefix = FAMILIES[config.model_type].mtp_prefix
    extra = tuple(f"model.layers.{layer}." if prefix is None else prefix for layer in further)
    for name, tensor in found.items():
        # Old files hold the rotary tables, and the head though it is the embedding.
        old = name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight") or _is_of_shared_layer(config, name)
        if name not in expected and not old and not name.startswith(extra):
            yield f"`{name}` in {tensor.file} is no tensor of a {config.model_type} model"


def _is_of_shared_layer(config: DecoderConfig, name: str) -> bool:
    """Keys and values that a layer has, though it attends to those of another."""
    shared = (layer for layer, heads in enumerate(config.layer_heads) if heads.source is not None)
    return any(name.startswith(tuple(f"model.layers.{layer}.self_attn.{part}" for part in _KEYS_AND_VALUES)) for layer in shared)


def _file_of(directory: Path, name: str) -> str:
    """Where a tensor should be, as far as one can tell."""
    index = directory / _INDEX
    if index.exists() and isinstance(file := json.loads(index.read_text())["weight_map"].get(name), str):
        return file
    files = weight_files(directory)
    return files[0].name if len(files) == 1 else f"each of the {len(files)} weight files"


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise InvalidInput(f"the weight index names `{name}`: only files of the same directory are read", field="model")
    return name


def _nothing_found(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        return f"{directory} has only pickled weights, which are never loaded: save it again with safe_serialization=True"
    return f"{directory} has no *.safetensors file"
