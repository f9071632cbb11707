"""`bloomery sync diff`, `apply` and `merge`: safetensors and deltas in, files out.

Weights and deltas are mapped and gone through a chunk at a time, so memory is that of a few chunks however large a model is.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from filecmp import cmp
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.disk.mapped import mapped
from bloomery.sync.codec.applying import check_sample, patch
from bloomery.sync.codec.container import Head
from bloomery.sync.codec.delta import Choice, Delta, Told, write
from bloomery.sync.codec.files import OWN_INDEX, FileWeights, beside, naming
from bloomery.sync.codec.layout import Chunk
from bloomery.sync.codec.merge import write_merged
from bloomery.sync_files import foreign
from bloomery.sync_files.atomic import new_directory, new_file, refuse_existing
from bloomery.types.errors import InvalidInput, NotFound

Progress = Callable[[str, int, int], object]
"""Is told a phase, and how many bytes of how many are done."""
_PIECE_BYTES: Final = 64 << 20


class Diff(NamedTuple):
    """What `diff` wrote."""

    head: Head
    changed: int
    """Elements that differ."""
    differing: list[Path]
    """Files beside the weights that differ, and are in no delta."""
    seconds: float


class Applied(NamedTuple):
    """What `apply` wrote."""

    size_bytes: int
    root: str
    files: int
    left: list[Path]
    """What lies beside the old weights and was not copied."""
    seconds: float


class Merged(NamedTuple):
    """What `merge` wrote."""

    head: Head
    size_bytes: int
    """Of the deltas together."""
    seconds: float


def diff(old: Path, new: Path, out: Path, *, codec: Choice, workers: int, progress: Progress) -> Diff:
    """Write the delta from one set of weights to another."""
    began = time.perf_counter()
    refuse_existing(out)
    with FileWeights(old) as before, FileWeights(new) as after, _errors_of(out), new_file(out) as partial:
        written = write(partial.file, before, after, codec=codec, workers=workers, told=_chunks("encode", after.layout.size_bytes, progress))
    differing = _differing(old, before.paths, new, after.paths) if old.is_dir() and new.is_dir() else []
    return Diff(written.head, written.changed, differing, time.perf_counter() - began)


def apply(base: Path, deltas: Sequence[Path], out: Path, *, workers: int, progress: Progress) -> Applied:
    """Write what becomes of weights, in files as they are there, with everything else of their directory that is not of their old state."""
    began = time.perf_counter()
    refuse_existing(out)
    if base.is_dir() and out.resolve().is_relative_to(base.resolve()):
        raise InvalidInput(f"{out} is within {base}, which would become part of itself: choose another place", field="out")
    with _patching(deltas, workers, progress) as patching, FileWeights(base) as weights:
        patching.check(weights)
        with _errors_of(out):
            if base.is_dir():
                return _apply_to_directory(weights, patching, out, progress, began)
            return _apply_to_file(weights, patching, out, progress, began)


def merge(deltas: Sequence[Path], out: Path, *, base: Path | None, codec: Choice, workers: int, progress: Progress) -> Merged:
    """Write one delta that does what several do."""
    began = time.perf_counter()
    refuse_existing(out)
    with ExitStack() as stack:
        steps = stack.enter_context(opened(deltas))
        weights = None if base is None else stack.enter_context(FileWeights(base))
        told = _chunks("merge", steps[0].layout.size_bytes, progress)
        with _errors_of(out), new_file(out) as partial:
            head = write_merged(partial.file, steps, weights, codec=codec, workers=workers, told=told)
    return Merged(head, sum(path.stat().st_size for path in deltas), time.perf_counter() - began)


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[Delta]]:
    """Deltas in files, mapped."""
    with ExitStack() as stack:
        found = []
        for path in paths:
            if not path.is_file():
                raise NotFound(f"there is no delta {path}")
            file = stack.enter_context(path.open("rb"))
            with naming(path):
                found.append(Delta.parse(mapped(file.fileno())))
        yield found


class _Patching(NamedTuple):
    """How deltas are held against weights, and applied to a copy of them, whose root they say."""

    check: Callable[[FileWeights], object]
    patch: Callable[[Path], str]


@contextmanager
def _patching(deltas: Sequence[Path], workers: int, progress: Progress) -> Iterator[_Patching]:
    """Of other programs' deltas each tells only when all of it is applied whether it is of these weights."""
    if foreign.are_foreign(deltas):
        if workers != 1:
            raise InvalidInput("--workers is for deltas of bd1", field="--workers")
        yield _Patching(lambda weights: None, lambda path: foreign.patch(path, deltas))
        return
    with opened(deltas) as steps:
        yield _Patching(lambda weights: check_sample(steps, weights), lambda path: _patched(path, steps, workers, progress))


def _apply_to_directory(base: FileWeights, patching: _Patching, out: Path, progress: Progress, began: float) -> Applied:
    around = beside(base.path, base.paths)
    with new_directory(out) as partial:
        for name in around.kept:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            with (base.path / name).open("rb") as source, (partial / name).open("xb") as target:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
        done, total = 0, sum(path.stat().st_size for path in base.paths)
        for path in base.paths:
            with path.open("rb") as source, (partial / path.name).open("xb") as target:
                for count in _copied(source.fileno(), target.fileno()):
                    done += count
                    progress("copy", done, total)
        root = patching.patch(partial)
    files = len(around.kept) + len(base.paths)
    return Applied(total, root, files, around.left, time.perf_counter() - began)


def _apply_to_file(base: FileWeights, patching: _Patching, out: Path, progress: Progress, began: float) -> Applied:
    (path,) = base.paths
    with new_file(out) as partial:
        done, total = 0, path.stat().st_size
        with path.open("rb") as source:
            for count in _copied(source.fileno(), partial.file.fileno()):
                done += count
                progress("copy", done, total)
        root = patching.patch(partial.path)
    return Applied(total, root, 1, [], time.perf_counter() - began)


def _patched(path: Path, deltas: list[Delta], workers: int, progress: Progress) -> str:
    with FileWeights(path, writable=True) as weights:
        root = patch(deltas, weights, workers=workers, told=_chunks("apply", weights.layout.size_bytes, progress))
        weights.sync()
    return str(root)


def _copied(source: int, target: int) -> Iterator[int]:
    """Copy a file piece by piece, and say how long each piece was: by the file system itself where it can, which may share what nobody writes."""
    by_itself = True
    while True:
        try:
            count = os.copy_file_range(source, target, _PIECE_BYTES) if by_itself else os.sendfile(target, source, None, _PIECE_BYTES)
        except OSError:
            if not by_itself:
                raise
            by_itself = False
            continue
        if not count:
            return
        yield count


def _chunks(phase: str, total: int, progress: Progress) -> Told:
    done = 0

    def told(chunk: Chunk) -> None:
        nonlocal done
        done += chunk.size_bytes
        progress(phase, done, total)

    return told


def _differing(old: Path, old_weights: list[Path], new: Path, new_weights: list[Path]) -> list[Path]:
    """Files beside the weights that both have or one, and that are not the same."""
    before, after = ({*beside(path, weights).kept} - {Path(OWN_INDEX)} for path, weights in ((old, old_weights), (new, new_weights)))
    return sorted(name for name in before | after if name not in before & after or not cmp(old / name, new / name, shallow=False))


@contextmanager
def _errors_of(out: Path) -> Iterator[None]:
    """What the system says of a handle, a full disk say, names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(out)
        raise
