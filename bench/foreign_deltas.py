"""Deltas of ours and of others between the same two checkpoints (`bench.weights`): sizes, how many times as large theirs are, and their speeds.

`fireworks-delta-compression` runs as it was published, in an environment of its own (`bench/peers/deltas.py`). Its arc_v3 takes the smallest of
what its threads have made by a deadline: `arc_v3` is that, and `arc_v3_patient` the smallest of all, for which it is told to wait. `written_here`
are the same formats as `bloomery.sync.foreign` writes them. XOR with zstd and coordinates with zstd (PULSE) are written anew from what is known of
them: their sizes are faithful, their speeds are not those of anybody's program.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.line import Line, parser_of
from bench.peers import command, python_of
from bench.weights import Shape, checkpoints, shapes
from bloomery.sync.codec import delta
from bloomery.sync.codec.files import FileWeights
from bloomery.sync.foreign import delta as foreign
from bloomery.types import tensor_file
from bloomery.types.tensor_file import TensorSpec

PATIENCE: Final = {"ARC3_CANDIDATE_WAIT_MULTIPLIER": "1000000"}
"""So that the package waits for all that it tries."""
_CODECS: Final[tuple[delta.Choice, ...]] = ("tight", "fast+zstd")
_SCRIPT: Final = Path(__file__).parent / "peers" / "deltas.py"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=6000, help="rows of the embedding")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    line = Line("foreign_deltas")
    for learning_rate in options.learning_rate:
        with TemporaryDirectory() as folder:
            old, new = generated(Path(folder), shapes(options.layers, tokens=options.tokens), learning_rate)
            line.tell({"learning_rate": learning_rate, "peer": command("arc", _SCRIPT.name), **measure(old, new, options.repeats)})


def generated(folder: Path, tensors: Sequence[Shape], learning_rate: float) -> tuple[Path, Path]:
    """Two checkpoints, one update apart, as safetensors files."""
    specs = {shape.name: TensorSpec("BF16", (shape.rows, shape.columns) if shape.rows > 1 else (shape.columns,)) for shape in tensors}
    files = folder / "old.safetensors", folder / "new.safetensors"
    made = [checkpoints(shape, learning_rate, 1, 0) for shape in tensors]
    for number, file in enumerate(files):
        with file.open("wb") as output:
            output.write(tensor_file.header(specs, {}))
            for steps in made:
                output.write(steps[number].tobytes())
    return files


def measure(old: Path, new: Path, repeats: int) -> dict[str, Any]:
    """What others make of two files, and what is made of them here; `times_as_large` is by our delta of that codec."""
    said = _peers(old, new, repeats, {})
    patient = _peers(old, new, 1, PATIENCE)["peers"]["arc_v3"]
    peers = {**said.pop("peers"), "arc_v3_patient": {"size_bytes": patient["size_bytes"]}}
    with FileWeights(old) as before, FileWeights(new) as after:
        ours = {codec: len(delta.encode(before, after, codec)) for codec in _CODECS}
        written_here = {form: len(foreign.encode(before, after, form)) for form in foreign.FORMATS}
    times = {codec: {name: round(peer["size_bytes"] / size, 3) for name, peer in peers.items()} for codec, size in ours.items()}
    return {**said, "size_bytes": ours, "written_here": written_here, "peers": peers, "times_as_large": times}


def _peers(old: Path, new: Path, repeats: int, env: dict[str, str]) -> dict[str, Any]:
    argv = [str(each) for each in (python_of("arc"), "-W", "ignore", _SCRIPT, old, new, repeats)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, env={**os.environ, **env})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
