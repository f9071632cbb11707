"""An engine that samples plainly says that nobody can count on its bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from bloomery.config import EngineConfig, ModelConfig
from bloomery.engine.executor import Connected, Executor, Stop
from bloomery.engine.hosted import CheckpointAfter
from bloomery.models import tiny
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.types.protocol import FromEngine, Welcome


@pytest.mark.parametrize("plain", [False, True])
def test_only_an_engine_that_is_not_plain_claims_the_bits_that_the_probe_found(tmp_path: Path, plain: bool) -> None:
    found = probe(load_decoder(tiny.PATH, dtype=torch.float32)).bit_exact
    assert welcome(tmp_path, plain=plain, threads=1).bit_exact == (found and not plain)


@pytest.mark.slow
def test_only_replicas_that_are_not_plain_sample_alike_with_other_threads(tmp_path: Path) -> None:
    with restored_threads():
        torch.set_num_threads(2)
        found = probe(load_decoder(tiny.PATH, dtype=torch.float32))
    one, two = (welcome(tmp_path, plain=False, threads=threads) for threads in (1, 2))
    assert one.numerics != two.numerics
    assert (one.sampling_numerics == two.sampling_numerics) == (found.bit_exact and found.form.one_thread)
    plain = [welcome(tmp_path, plain=True, threads=threads) for threads in (1, 2)]
    assert [said.sampling_numerics for said in plain] == [one.numerics, two.numerics]


def welcome(directory: Path, *, plain: bool, threads: int) -> Welcome:
    """What a replica of the shipped model says of itself."""
    model = ModelConfig(alias="tiny", path=str(tiny.PATH), base_hash="b", dtype="float32", threads=threads, socket="")
    said: list[FromEngine] = []
    inbox: SimpleQueue[Any] = SimpleQueue()
    for command in (Connected(1), Stop()):
        inbox.put(command)
    with restored_threads():
        config = EngineConfig(data_dir=str(directory), model=model, role="replica", plain=plain)
        Executor(config, inbox, lambda _, message: said.append(message), CheckpointAfter()).run()
    (found,) = [message for message in said if isinstance(message, Welcome)]
    return found


@contextmanager
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
