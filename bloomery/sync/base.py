"""The state of a base model, taken from its files by a way of its own: what a process loaded is held against it.

The engine of a base takes it once for each dtype it is computed in, and leaves it under `base_key` for every process that holds the same base
later; it is of the values after the cast, which is the same everywhere.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from bloomery.models.families import read_config
from bloomery.models.names import stored_places
from bloomery.models.weight_files import own_name, weight_files
from bloomery.sync.live import first_indices, hash_tensor
from bloomery.sync.proof import Expected
from bloomery.sync.publish import base_state_key
from bloomery.sync.state_hash import StateHash, total
from bloomery.types.errors import Corrupt
from bloomery.types.probe import base_name


def base_key(base_hash: str, dtype: torch.dtype) -> str:
    """Where the state of a base model lies, once it was taken."""
    return base_state_key(base_name(base_hash, str(dtype).removeprefix("torch.")))


def base_state(directory: Path, dtype: torch.dtype) -> dict[str, StateHash]:
    """Of every tensor, from one pass over the files."""
    places = dict(stored_places(read_config(directory)))
    firsts = first_indices({name: math.prod(place.shape) for name, place in places.items()})
    found = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if (place := places.get(name := own_name(stored))) is not None:
                    values = file.get_tensor(stored).to(torch.float32 if place.in_float32 else dtype)
                    found[name] = hash_tensor(values, firsts[name])
    return found


def expected_base(base_hash: str, state: Mapping[str, StateHash]) -> Expected:
    """What the live tensors of a base must hash to."""
    return Expected(base_hash, total(state.values()), state)


def write_state(state: Mapping[str, StateHash]) -> bytes:
    """The document that `read_state` reads."""
    return json.dumps({name: str(each) for name, each in sorted(state.items())}).encode()


def read_state(data: bytes) -> dict[str, StateHash]:
    """What was left; Corrupt where it is damaged."""
    try:
        return {name: StateHash.parse(text) for name, text in json.loads(data).items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        advice = "delete it under bases/ in the data directory, and it is taken again"
        raise Corrupt(f"the state of the base model is damaged: {error}; {advice}") from error
