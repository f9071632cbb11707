"""Weights that are several times larger than the memory that is stated: a process that may take no more reads a chain, and makes and applies deltas.

Only memory that is a process's own is limited: files are mapped, and pages of them are the system's to drop.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.codec.files import FileWeights
from bloomery.types import tensor_file
from bloomery.types.tensor_file import TensorSpec

ELEMENTS = 48 << 20
WEIGHTS_BYTES = 2 * ELEMENTS
BOUND_BYTES = WEIGHTS_BYTES // 4
RETURNING = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Has glibc give back what is freed at once: what it keeps for later is not what somebody holds."""
LIMITED = f"""
    import resource, sys, threading
    from pathlib import Path

    def limited():
        \"\"\"From here on no more than the bound comes to what there is.\"\"\"
        threading.stack_size(1 << 18)
        (data,) = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (int(data[1]) * 1024 + {BOUND_BYTES},) * 2)
"""
READING = """
    import numpy as np
    from bloomery.store.objects import Folder
    from bloomery.sync.chain.download import FetchConfig
    from bloomery.sync.chain.receiver import ReceiveConfig, Receiver
    from bloomery.sync.codec import kernels
    from bloomery.sync.codec.layout import Layout, MemoryWeights
    from bloomery.types.tensor_file import TensorSpec
    store, weights, folder, elements = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    kernels.available()
    layout = Layout.of({"a": TensorSpec("BF16", (elements,))})
    # What weights take themselves is not in question: these lie in a file.
    live = MemoryWeights(layout, {"a": np.memmap(weights, np.uint16, "w+", shape=(elements,))})
    config = ReceiveConfig(fetch=FetchConfig(range_bytes=1 << 20, at_once=4))
    limited()
    with Receiver.open(Folder(store), live, "run-1", folder=folder, config=config) as receiver:
        receiver.join(1)
        assert receiver.stage() is not None
        receiver.flip()
        receiver.settle()
        print(receiver.sequence)
"""
COMMAND = """
    from bloomery.cli.main import app
    from bloomery.sync.codec import kernels
    from bloomery.sync_files import actions, foreign
    kernels.available()
    limited()
    app(sys.argv[1:], standalone_mode=False)
"""


def done(script: str, *arguments: object) -> str:
    code = textwrap.dedent(LIMITED) + textwrap.dedent(script)
    argv, environment = [sys.executable, "-c", code, *map(str, arguments)], {**os.environ, **RETURNING}
    made = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def written(path: Path, bits: np.ndarray) -> Path:
    with path.open("wb") as file:
        file.write(tensor_file.header({"a": TensorSpec("BF16", (ELEMENTS,))}, {}))
        bits.tofile(file)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions, from one to the next of which a hundredth changes."""
    folder = tmp_path_factory.mktemp("versions")
    bits = np.random.default_rng(0).integers(1 << 16, size=ELEMENTS, dtype=np.uint16)
    found = []
    for number in range(3):
        bits[number::100] += 1
        found.append(written(folder / f"{number}.safetensors", bits))
    return found


@pytest.mark.slow
def test_a_reader_joins_and_stages_weights_four_times_as_large_as_what_it_may_hold(files: list[Path], tmp_path: Path) -> None:
    objects, before = Folder(tmp_path / "store"), None
    with Publisher.open(objects, "run-1", holder="trainer", config=PublishConfig(base_codec="raw", merged=False)) as publisher:
        for file in files:
            with FileWeights(file) as weights:
                publisher.publish(before, weights)
            before = FileWeights(file)
    assert done(READING, tmp_path / "store", tmp_path / "weights", tmp_path / "reader", ELEMENTS) == "2\n"
    assert (tmp_path / "weights").read_bytes() == files[-1].read_bytes()[-WEIGHTS_BYTES:]


@pytest.mark.slow
def test_diff_and_apply_go_through_files_four_times_as_large_as_what_they_may_hold(files: list[Path], tmp_path: Path) -> None:
    deltas = [tmp_path / f"{number}.bd1" for number in (1, 2)]
    for old, new, delta in zip(files, files[1:], deltas, strict=False):
        done(COMMAND, "sync", "diff", old, new, delta)
        assert delta.stat().st_size < WEIGHTS_BYTES / 50
    done(COMMAND, "sync", "apply", files[0], *deltas, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == files[-1].read_bytes()
