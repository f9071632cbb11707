"""What a snapshot is, in one canonical JSON document whose hash is the version's identity.

The tensors travel as one safetensors blob. The trainer's engine describes the blob in a manifest; whoever loads it later describes what it got and
compares, before it samples with it: the blob by its digests, and what it made of that in its memory by the state hashes (`state_hash`, `live`).

Manifests of format 1 have no state hashes and name no tokenizer. They are read as what they are, under the version that they always had.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple

import msgspec
from blake3 import blake3

from bloomery.sync.state_hash import StateHash, elements, hash_parts, total
from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt
from bloomery.types.wire import Wire

Kind = Literal["lora", "full"]
DIGEST_HEX_DIGITS = 32
_NEW_IN_2: Final = ("state", "tokenizer_hash")
_NEW_OF_TENSORS_IN_2: Final = ("state",)
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class TensorEntry(Wire, frozen=True):
    """One tensor of a snapshot; `digest` covers its values, little-endian and C-contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    state: str = ""
    """State hash of its elements, counted behind those of the tensors before it; empty in format 1."""


class Manifest(Wire, frozen=True, kw_only=True, dict=True):
    """One immutable set of sampling weights: a LoRA adapter over the base model `base`, or (`full`) all tensors of a model trained from it."""

    format: Literal[1, 2] = 2
    kind: Kind = "lora"
    run_id: str
    step: int
    base: str
    """Hash of the base model, tokenizer and template included."""
    parent: str
    """The version these weights were trained from: the run's snapshot before this one, at first the base."""
    template_hash: str
    tokenizer_hash: str = ""
    """Of the files that turn texts into tokens (`tokenizer.py`); empty in format 1."""
    numerics: str
    """Numerics id of the trainer: equal log-probabilities are promised under the same id."""
    rank: int
    """0 for a full model."""
    alpha: float
    targets: tuple[str, ...]
    key: str
    """Blob that holds the tensors."""
    size_bytes: int
    state: str = ""
    """Root: the sum of the state hashes of all tensors; empty in format 1."""
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> bytes:
        """The canonical bytes: equal manifests give equal bytes on every machine."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        fields = msgspec.to_builtins(self)
        if self.format == 1:
            _leave_out(fields, _NEW_IN_2)
            for entry in fields["tensors"]:
                _leave_out(entry, _NEW_OF_TENSORS_IN_2)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Read a manifest blob; anything but the canonical bytes of a manifest is refused."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"this is not a manifest of format 1 or 2: {error}") from error
        if manifest.to_json() != data:
            raise Corrupt("the manifest is not in canonical form, so its hash would not identify it")
        if manifest.format == 2:
            _check_states(manifest)
        # Of the bytes that were just found to be the canonical ones.
        manifest.__dict__["version"] = digest(data)
        return manifest

    @cached_property
    def version(self) -> str:
        """Identity of the snapshot, in responses and as the name of the manifest blob."""
        return digest(self.to_json())


def digest(data: bytes | memoryview) -> str:
    """The hash used for versions, blobs and tensors: the first 128 bits of blake3."""
    return blake3(data).hexdigest()[:DIGEST_HEX_DIGITS]


def describe(blob: bytes) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors blob, in the order of their names, with their state hashes."""
    return tuple(_described(blob, with_states=True))


def root(entries: Iterable[TensorEntry]) -> str:
    """State hash of all tensors together."""
    return str(total(StateHash.parse(entry.state) for entry in entries))


def verify(manifest: Manifest, blob: bytes | memoryview) -> tuple[TensorEntry, ...]:
    """Refuse a blob whose tensors are not, bit for bit, those that the manifest names; returns them with their state hashes, in any format.

    A whole model's are those of the manifest, where it has them, without a second pass over the blob: the live tensors are held against them next
    (`proof.prove`). Those of an adapter are held against the values here, because one that is multiplied by a scale has other hashes in memory.
    """
    with_states = manifest.kind == "lora" or manifest.format == 1
    described = tuple(_described(blob, with_states=with_states))
    if described == manifest.tensors:
        return described
    expected = {entry.name: _without_state(entry) for entry in manifest.tensors}
    found = {entry.name: _without_state(entry) for entry in described}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not wrong and manifest.format == 2 and with_states:
        wrong = [entry.name for entry, own in zip(manifest.tensors, described, strict=True) if entry.state != own.state]
    if wrong:
        raise Corrupt(f"blob `{manifest.key}` does not hold version {manifest.version}: {len(wrong)} tensors differ, first `{wrong[0]}`")
    return described if with_states else manifest.tensors


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def item_bytes(self) -> int:
        """Of an element."""
        return max(1, (self.stop - self.start) // max(1, math.prod(self.shape)))


def _described(blob: bytes | memoryview, *, with_states: bool) -> Iterator[TensorEntry]:
    data, tensors = memoryview(blob), sorted(_tensors(blob), key=lambda tensor: tensor.name)
    states = map(str, _states(data, tensors)) if with_states else repeat("")
    for (name, dtype, shape, start, stop), state in zip(tensors, states, strict=False):
        yield TensorEntry(name=name, dtype=dtype, shape=shape, digest=digest(data[start:stop]), state=state)


def _states(data: memoryview, tensors: Sequence[_Tensor]) -> Iterator[StateHash]:
    """Those that lie back to back in their order, as all of an adapter do, in one pass."""
    first = 0
    for run in _back_to_back(tensors):
        start, item_bytes = run[0].start, run[0].item_bytes
        yield from hash_parts(elements(data[start : run[-1].stop], item_bytes), [(each.stop - start) // item_bytes for each in run], first)
        first += (run[-1].stop - start) // item_bytes


def _back_to_back(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    run: list[_Tensor] = []
    for tensor in tensors:
        if run and (tensor.start, tensor.item_bytes) != (run[-1].stop, run[0].item_bytes):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _tensors(blob: bytes | memoryview) -> Iterator[_Tensor]:
    for name, place in tensor_file.places(blob, size=len(blob)).items():
        yield _Tensor(name, _DTYPES.get(place.spec.dtype, place.spec.dtype), place.spec.shape, place.start, place.stop)


def _check_states(manifest: Manifest) -> None:
    """What follows from the tensors must follow from them here: whoever compares with the root alone compares with all of them."""
    names = [entry.name for entry in manifest.tensors]
    try:
        summed = root(manifest.tensors)
    except ValueError as error:
        raise Corrupt(f"a manifest of format 2 has a state hash for every tensor: {error}") from error
    if summed != manifest.state:
        raise Corrupt(f"the manifest says that its tensors add up to {manifest.state}, and they add up to {summed}")
    if names != sorted(set(names)):
        raise Corrupt("the manifest does not name its tensors in order, each once, so their elements have no index")


def _without_state(entry: TensorEntry) -> TensorEntry:
    return msgspec.structs.replace(entry, state="")


def _leave_out(fields: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        del fields[name]
