"""Which files hold a model's weights, and how large they are: headers only, no torch, so that the supervisor can tell before anything loads."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from bloomery.types.errors import InvalidInput

_MAX_HEADER_BYTES = 100 << 20


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files in order: those of the index when there is one, else `model.safetensors`, else every one."""
    index = directory / "model.safetensors.index.json"
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


def count_parameters(directory: Path) -> int:
    """Parameters as the headers have them, without reading a tensor."""
    headers = [read_header(file) for file in weight_files(directory)]
    return sum(math.prod(entry["shape"]) for header in headers for name, entry in header.items() if name != "__metadata__")


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


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise InvalidInput(f"the weight index names `{name}`: only files of the same directory are read", field="model")
    return name


def _nothing_found(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        return f"{directory} has only pickled weights, which are never loaded: save it again with safe_serialization=True"
    return f"{directory} has no *.safetensors file"
