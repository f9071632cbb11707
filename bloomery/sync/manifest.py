"""What a snapshot is, in one canonical JSON document whose hash is the version's identity.

The tensors travel as one safetensors blob. The trainer's engine describes the blob in a manifest; whoever loads it later describes what it got and
compares, before it samples with it.
"""

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3

from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

Kind = Literal["lora", "full"]
DIGEST_HEX_DIGITS = 32
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class TensorEntry(Wire, frozen=True):
    """One tensor of a snapshot; `digest` covers its values, little-endian and C-contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class Manifest(Wire, frozen=True, kw_only=True):
    """One immutable set of sampling weights: a LoRA adapter over the base model `base`, or (`full`) all tensors of a model trained from it."""

    format: Literal[1] = 1
    kind: Kind = "lora"
    run_id: str
    step: int
    base: str
    """Hash of the base model, tokenizer and template included."""
    parent: str
    """The version these weights were trained from: the run's snapshot before this one, at first the base."""
    template_hash: str
    numerics: str
    """Numerics id of the trainer: equal log-probabilities are promised under the same id."""
    rank: int
    """0 for a full model."""
    alpha: float
    targets: tuple[str, ...]
    key: str
    """Blob that holds the tensors."""
    size_bytes: int
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> bytes:
        """The canonical bytes: equal manifests give equal bytes on every machine."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Read a manifest blob; anything but the canonical bytes of a manifest is refused."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"this is not a manifest of format 1: {error}") from error
        if manifest.to_json() != data:
            raise Corrupt("the manifest is not in canonical form, so its hash would not identify it")
        return manifest

    @property
    def version(self) -> str:
        """Identity of the snapshot, in responses and as the name of the manifest blob."""
        return digest(self.to_json())


def digest(data: bytes | memoryview) -> str:
    """The hash used for versions, blobs and tensors: the first 128 bits of blake3."""
    return blake3(data).hexdigest()[:DIGEST_HEX_DIGITS]


def describe(blob: bytes) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors blob, in the order of their names."""
    entries = [TensorEntry(name=name, dtype=dtype, shape=shape, digest=digest(values)) for name, dtype, shape, values in _tensors(blob)]
    return tuple(sorted(entries, key=lambda entry: entry.name))


def verify(manifest: Manifest, blob: bytes) -> None:
    """Refuse a blob whose tensors are not, bit for bit, those that the manifest names."""
    expected = {entry.name: entry for entry in manifest.tensors}
    found = {entry.name: entry for entry in describe(blob)}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise Corrupt(f"blob `{manifest.key}` does not hold version {manifest.version}: {len(wrong)} tensors differ, first `{wrong[0]}`")


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: memoryview


def _tensors(blob: bytes) -> Iterator[_Tensor]:
    for name, place in tensor_file.places(blob, size=len(blob)).items():
        yield _Tensor(name, _DTYPES.get(place.spec.dtype, place.spec.dtype), place.spec.shape, memoryview(blob)[place.start : place.stop])
