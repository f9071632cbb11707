"""`bloomery sync` with deltas as `fireworks-delta-compression` has them: one file for a file of weights, a directory of such files for a directory.

They are known by their content. Unlike our own they are read into memory, each with the largest of its tensors.
"""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bloomery.models.weight_files import weight_files
from bloomery.sync.codec.files import FileWeights, naming
from bloomery.sync.codec.states import state_of, states_of
from bloomery.sync.foreign import delta, one_piece
from bloomery.sync.foreign.delta import ForeignDelta, Format
from bloomery.sync.state_hash import total
from bloomery.sync_files.atomic import new_directory, new_file, refuse_existing
from bloomery.types.errors import Corrupt, InvalidInput, NotFound

_START_BYTES: Final = 16


class Diff(NamedTuple):
    """What `diff` wrote."""

    size_bytes: int
    weights_bytes: int
    files: int
    seconds: float


def are_foreign(deltas: Sequence[Path]) -> bool:
    """Whether they look like these; InvalidInput where some do and some do not."""
    found = {_looks_so(path) for path in deltas}
    if len(found) > 1:
        raise InvalidInput("deltas of other programs and our own are not applied in one go: apply the first of one kind first", field="deltas")
    return found == {True}


def diff(old: Path, new: Path, out: Path, form: Format) -> Diff:
    """Write the delta from one set of weights to another, which has the same tensors in files of the same names."""
    began = time.perf_counter()
    refuse_existing(out)
    if not old.is_dir() or not new.is_dir():
        with new_file(out) as partial:
            written = [_write(old, new, partial.path, form)]
    else:
        names = [path.name for path in weight_files(old)]
        if (others := [path.name for path in weight_files(new)]) != names:
            odd = min(set(names) ^ set(others))
            raise InvalidInput(f"{form} has a delta for every file, and `{odd}` is in one of {old} and {new} alone", field="new")
        with new_directory(out) as directory:
            written = [_write(old / name, new / name, directory / name, form) for name in names]
    size_bytes, weights_bytes = (sum(sizes) for sizes in zip(*written, strict=True))
    return Diff(size_bytes, weights_bytes, len(written), time.perf_counter() - began)


def patch(weights: Path, deltas: Sequence[Path]) -> str:
    """Apply deltas one behind the other to weights that nobody else reads, and say what root they have then; Corrupt where one is not of these."""
    for path in deltas:
        for file, of in _steps(path, weights):
            with FileWeights(of, writable=True) as live:
                with naming(file):
                    delta.apply(ForeignDelta.parse(file.read_bytes()), live)
                live.sync()
    with FileWeights(weights) as found:
        return str(total(map(state_of, states_of(found))))


def inspect(path: Path, base: Path | None) -> dict[str, Any]:
    """As JSON has it; what arc_v2 changes is not known without the weights that it starts from."""
    files = [_inspected(file, base and of) for file, of in _steps(path, base or path)]
    tensors = sorted((tensor for file in files for tensor in file["tensors"]), key=lambda tensor: str(tensor["name"]))
    size_bytes, weights_bytes = _sum(file["size_bytes"] for file in files), _sum(file["weights_bytes"] for file in files)
    elements, changed = _sum(tensor["elements"] for tensor in tensors), _sum(tensor["changed"] for tensor in tensors)
    return {
        "file": str(path),
        "format": " and ".join(sorted({file["format"] for file in files})),
        "size_bytes": size_bytes,
        "weights_bytes": weights_bytes,
        "ratio": None if weights_bytes is None or size_bytes is None else weights_bytes / size_bytes,
        "elements": elements,
        "changed": changed,
        "changed_share": changed / elements if changed is not None and elements else None,
        "bits_per_changed": 8 * size_bytes / changed if changed and size_bytes is not None else None,
        "tensors": tensors,
    }


def _inspected(path: Path, base: Path | None) -> dict[str, Any]:
    with naming(path):
        found = ForeignDelta.parse(path.read_bytes())
        tensors, weights_bytes = [each._asdict() for each in found.describe()], None
        if base is not None:
            with FileWeights(base) as weights:
                counts = _counted(found, weights)
                tensors, weights_bytes = [{**each, **counts[each["name"]]} for each in tensors], weights.layout.size_bytes
    return {"format": found.format, "size_bytes": path.stat().st_size, "weights_bytes": weights_bytes, "tensors": tensors}


def _counted(found: ForeignDelta, weights: FileWeights) -> dict[str, dict[str, int]]:
    """Elements of every tensor, and how many change, once that was held against its Adler-32."""
    found.check_names(weights.layout)
    counts = {}
    for tensor in weights.layout.tensors:
        changed = found.changes(tensor, one_piece.read(weights, tensor))
        counts[tensor.name] = {"elements": tensor.numel, "changed": len(changed.positions)}
    return counts


def _write(old: Path, new: Path, out: Path, form: Format) -> tuple[int, int]:
    """Bytes of the delta, and of the weights."""
    with FileWeights(old) as before, FileWeights(new) as after, out.open("wb") as file:
        data = delta.encode(before, after, form)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data), before.layout.size_bytes


def _steps(path: Path, weights: Path) -> list[tuple[Path, Path]]:
    """The files of a delta, and the weights that each is of."""
    if not path.is_dir():
        return [(path, weights)]
    files = weight_files(path)
    if not weights.is_dir() or [file.name for file in files] != [file.name for file in weight_files(weights)]:
        raise Corrupt(f"{path} has a delta for each of some files, and these weights have others")
    return [(file, weights / file.name) for file in files]


def _looks_so(path: Path) -> bool:
    first = weight_files(path)[0] if path.is_dir() else path
    if not first.is_file():
        raise NotFound(f"there is no delta {path}")
    with first.open("rb") as file:
        return delta.looks_so(file.read(_START_BYTES))


def _sum(values: Iterable[int | None]) -> int | None:
    """None where one is not known."""
    found = list(values)
    return None if None in found else sum(each for each in found if each is not None)
