"""A version as a directory that other programs load: `adapter` for `peft`, `merged` for `transformers`, which is every tensor of the model in the
dtype that it is served in, adapters added to the base.

Both lay the files out from headers alone; their bytes come about while they are read, a few MiB at a time. What is read from a blob is held
against its name or the manifest. No torch here.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from bloomery.models.families import read_config
from bloomery.models.names import module_of, stored_places
from bloomery.models.weight_files import own_name, weight_files
from bloomery.sync.manifest import DIGEST_HEX_DIGITS, Manifest
from bloomery.sync.peft import ADAPTER, CONFIG, peft_config, peft_tensors
from bloomery.sync.publish import key_of
from bloomery.sync.tokenizer import TOKENIZER_FILES
from bloomery.types import tensor_file
from bloomery.types.errors import Corrupt, NotSupported
from bloomery.types.tensor_file import START_BYTES, TensorPlace, TensorSpec

PIECE_BYTES: Final = 4 << 20
COPIED: Final = (
    "generation_config.json",
    *TOKENIZER_FILES,
    "chat_template.jinja",
    "chat_template.json",
)
"""What goes with the weights, where the base model has it."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PREFIX: Final = "base_model.model."
_UNEMBED: Final = "model.unembed_tokens"
_DENSE: Final = (".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.down_proj.", ".mixer.up_proj.", ".mixer.down_proj.", ".shared_experts.", ".shared_expert.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_SERVED: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Part = Callable[[int, int], bytes]
"""Bytes `start` to `stop` of a file or a blob."""


class ExportFile(NamedTuple):
    """One file of a directory: `pieces` gives its bytes, anew each time."""

    name: str
    size_bytes: int
    pieces: Callable[[], Iterator[bytes]]


def made(name: str, data: bytes) -> ExportFile:
    """A file that is there already."""
    return ExportFile(name, len(data), lambda: iter((data,)))


def blob_places(part: Part, size: int) -> Mapping[str, TensorPlace]:
    """Where the tensors of a blob lie, from its header."""
    return tensor_file.places(part(0, tensor_file.header_bytes(part(0, START_BYTES))), size=size)


def adapter(manifest: Manifest, part: Part, base_model: str) -> list[ExportFile]:
    """The files of an adapter as PEFT reads them; `part` reads its blob, `base_model` is what it is said to belong to."""
    if manifest.kind != "lora":
        raise NotSupported(f"version `{manifest.version}` is a whole model, not an adapter: ask for form merged", field="form")
    places = blob_places(part, manifest.size_bytes)
    if any(".experts." in name for name in places) and any(projection in name for name in places for projection in _DENSE):
        raise NotSupported(
            "the adapter is on experts and on dense or shared ones, which PEFT cannot load together: ask for form merged, or train without train_mlp",
            field="form",
        )
    specs = dict(peft_tensors(places))
    header = tensor_file.header(specs, {"format": "pt"})
    start = tensor_file.header_bytes(part(0, START_BYTES))

    def pieces() -> Iterator[bytes]:
        state, last = blake3(part(0, start)), header
        for first in range(start, manifest.size_bytes, PIECE_BYTES):
            yield last
            last = part(first, min(first + PIECE_BYTES, manifest.size_bytes))
            state.update(last)
        # Before the last piece goes out: a file that is damaged stays incomplete.
        if key_of(state.hexdigest()[:DIGEST_HEX_DIGITS]) != manifest.key:
            raise Corrupt(f"blob `{manifest.key}` is damaged: it does not match its name")
        yield last

    config = peft_config(specs, base_model=base_model, rank=manifest.rank, alpha=manifest.alpha)
    return [made(CONFIG, config), ExportFile(ADAPTER, len(header) + manifest.size_bytes - start, pieces)]


def merged(manifest: Manifest, part: Part, base: Path, *, max_shard_bytes: int) -> list[ExportFile]:
    """The files of a version over the base model in the directory `base`; `part` reads its blob. Weights are cut at `max_shard_bytes`."""
    tensors = _whole_model(manifest, part) if manifest.kind == "full" else _with_adapter(manifest, part, base)
    shards = _shards({name: tensor.spec for name, tensor in tensors.items()}, max_shard_bytes)
    names = _shard_names(len(shards))
    files = [made("config.json", _config(base, _dtype(manifest), tied=_HEAD not in tensors))]
    files += [made(name, (base / name).read_bytes()) for name in COPIED if (base / name).is_file()]
    files += [_weights_file(name, {tensor: tensors[tensor] for tensor in shard}) for name, shard in zip(names, shards, strict=True)]
    if len(shards) > 1:
        files.append(made("model.safetensors.index.json", _index(tensors, dict(zip(names, shards, strict=True)))))
    return files


class _Factors(NamedTuple):
    """What is added to a tensor: `scale * b @ a`, [r, I] and [O, r]."""

    a: Callable[[], NDArray[np.float32]]
    b: Callable[[], NDArray[np.float32]]
    scale: float


class _Tensor(NamedTuple):
    """A tensor of the model: its values in the base model's file or in the blob, how they are written, and what is added to them."""

    spec: TensorSpec
    part: Part
    place: TensorPlace
    factors: _Factors | None = None
    digest: str | None = None
    """Of values that are passed on as they are."""


def _whole_model(manifest: Manifest, part: Part) -> dict[str, _Tensor]:
    digests = _digests(manifest)
    return {name: _Tensor(place.spec, part, place, digest=digests[name]) for name, place in blob_places(part, manifest.size_bytes).items()}


def _with_adapter(manifest: Manifest, part: Part, base: Path) -> dict[str, _Tensor]:
    config, stored, dtype = read_config(base), _stored(base), _dtype(manifest)
    factors = _AdapterBlob(manifest, part)
    places = dict(stored_places(config))
    sources = {name: name for name in places}
    if config.tied_head and factors.of(_HEAD) is not None:
        # The head learned, the embedding did not: they are not the same matrix any more.
        sources[_HEAD] = _EMBEDDING
    tensors = {}
    for name, source in sources.items():
        path, place = stored[source]
        written = "F32" if name in places and places[name].in_float32 else dtype
        tensors[name] = _Tensor(TensorSpec(written, place.spec.shape), partial(_part_of_file, path), place, factors.of(name))
    return tensors


class _AdapterBlob:
    """Factors of a published adapter by the names of the tensors that they change."""

    def __init__(self, manifest: Manifest, part: Part) -> None:
        self._part, self._scale = part, manifest.alpha / max(1, manifest.rank)
        self._places, self._digests = blob_places(part, manifest.size_bytes), _digests(manifest)

    def of(self, tensor: str) -> _Factors | None:
        """What the adapter adds to a tensor of the model."""
        target = _UNEMBED if tensor == _HEAD else module_of(tensor).removesuffix(".weight")
        expert = _EXPERT.search(target)
        name = _PREFIX + (_EXPERT.sub(".experts.", target) if expert else target)
        if f"{name}.lora_A.weight" not in self._places:
            return None
        row = int(expert.group(1)) if expert else None
        a, b = (partial(self._values, f"{name}.lora_{side}.weight", row) for side in "AB")
        return _Factors(a, b, self._scale)

    def _values(self, name: str, expert: int | None) -> NDArray[np.float32]:
        place = self._places[name]
        data = self._part(place.start, place.stop)
        if blake3(data).hexdigest()[:DIGEST_HEX_DIGITS] != self._digests[name]:
            raise _damaged(name)
        values = decode(data, place.spec.dtype).reshape(place.spec.shape)
        return values if expert is None else values[expert]


def _weights_file(name: str, tensors: Mapping[str, _Tensor]) -> ExportFile:
    header = tensor_file.header({tensor: each.spec for tensor, each in tensors.items()}, {"format": "pt"})
    size = len(header) + sum(each.spec.size_bytes for each in tensors.values())

    def pieces() -> Iterator[bytes]:
        yield header
        for tensor, each in tensors.items():
            yield from _pieces(tensor, each)

    return ExportFile(name, size, pieces)


def _pieces(name: str, tensor: _Tensor) -> Iterator[bytes]:
    """The last one only when all that was read has proved to be what it should be: a file that is damaged stays incomplete."""
    state, last = blake3(), b""
    for data, piece in _written(tensor):
        yield last
        state.update(data)
        last = piece
    if tensor.digest not in (None, state.hexdigest()[:DIGEST_HEX_DIGITS]):
        raise _damaged(name)
    yield last


def _written(tensor: _Tensor) -> Iterator[tuple[bytes, bytes]]:
    """What is read, and what is written for it, some rows at a time."""
    stored, written, factors = tensor.place.spec, tensor.spec, tensor.factors
    a, b = (factors.a(), factors.b()) if factors is not None else (None, None)
    width = stored.size_bytes // max(1, stored.shape[0])
    rows = max(1, PIECE_BYTES // max(1, width))
    for first in range(0, stored.shape[0], rows):
        last = min(first + rows, stored.shape[0])
        data = tensor.part(tensor.place.start + first * width, tensor.place.start + last * width)
        if factors is None and stored.dtype == written.dtype:
            yield data, data
            continue
        values = decode(data, stored.dtype)
        if factors is not None and a is not None and b is not None:
            # Experts of one tensor lie in its first dimension.
            values = values + (b[first:last] @ (a if a.ndim == 2 else a[first:last])).ravel() * np.float32(factors.scale)
        yield data, encode(values, written.dtype)


def _damaged(name: str) -> Corrupt:
    return Corrupt(f"the weights blob does not hold tensor `{name}` as its manifest has it")


def decode(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Values as float32, rounded only where the stored numbers are wider."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float32)


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    """Values in a dtype, rounded to the nearest, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.size_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.size_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _index(tensors: Mapping[str, _Tensor], shards: Mapping[str, list[str]]) -> bytes:
    total = sum(tensor.spec.size_bytes for tensor in tensors.values())
    weight_map = {tensor: file for file, names in shards.items() for tensor in names}
    return _json({"metadata": {"total_size": total}, "weight_map": weight_map})


def _config(base: Path, dtype: str, *, tied: bool) -> bytes:
    raw: dict[str, Any] = json.loads((base / "config.json").read_text())
    raw.pop("torch_dtype", None)
    name = next(name for name, short in _SERVED.items() if short == dtype)
    return _json(raw | {"dtype": name, "tie_word_embeddings": tied})


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _dtype(manifest: Manifest) -> str:
    """What the version is served in."""
    return _SERVED[manifest.tensors[0].dtype]


def _digests(manifest: Manifest) -> dict[str, str]:
    return {entry.name: entry.digest for entry in manifest.tensors}


def _stored(directory: Path) -> dict[str, tuple[Path, TensorPlace]]:
    """File and place of every tensor of a model directory."""
    files = [(path, blob_places(partial(_part_of_file, path), path.stat().st_size)) for path in weight_files(directory)]
    return {own_name(name): (path, place) for path, places in files for name, place in places.items()}


def _part_of_file(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
