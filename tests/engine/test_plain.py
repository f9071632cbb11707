"""An engine that samples plainly says that nobody can count on its bits."""

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
    model = ModelConfig(alias="tiny", path=str(tiny.PATH), base_hash="b", dtype="float32", threads=1, socket="")
    said: list[FromEngine] = []
    inbox: SimpleQueue[Any] = SimpleQueue()
    for command in (Connected(1), Stop()):
        inbox.put(command)
    before = torch.get_num_threads()
    try:
        config = EngineConfig(data_dir=str(tmp_path), model=model, role="replica", plain=plain)
        Executor(config, inbox, lambda _, message: said.append(message), CheckpointAfter()).run()
        found = probe(load_decoder(tiny.PATH, dtype=torch.float32)).bit_exact
    finally:
        torch.set_num_threads(before)
    (welcome,) = [message for message in said if isinstance(message, Welcome)]
    assert welcome.bit_exact == (found and not plain)
