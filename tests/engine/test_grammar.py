"""What takes long about grammars and concerns nobody in particular is done before an engine serves."""

import shutil
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from bloomery.config import EngineConfig, ModelConfig
from bloomery.engine.executor import Connected, Executor, Stop
from bloomery.engine.hosted import CheckpointAfter
from bloomery.models import tiny
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, GenerateFailed, Grammar, SampledToken, SampleFinished, SamplingParams, Weights
from bloomery.types.protocol import FromEngine, SamplerEvents


def test_an_engine_has_read_its_tokenizer_when_it_begins_to_serve(tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny.PATH, tmp_path / "model"))
    told: list[Any] = []
    inbox: SimpleQueue[Any] = SimpleQueue()

    def deliver(_: int, message: FromEngine) -> None:
        told.extend(message.events if isinstance(message, SamplerEvents) else ())
        if told and isinstance(told[-1], SampleFinished | GenerateFailed):
            inbox.put(Stop())

    served = ModelConfig(alias="tiny", path=str(model), base_hash="b", dtype="float32", threads=1, socket="")
    before = torch.get_num_threads()
    try:
        executor = Executor(EngineConfig(data_dir=str(tmp_path / "data"), model=served, role="replica"), inbox, deliver, CheckpointAfter())
        (model / "tokenizer.json").unlink()
        prompt, params = Array.of(np.arange(300, 320, dtype=np.int32)), SamplingParams(max_tokens=20, seed=1)
        inbox.put(Connected(1))
        inbox.put(Generate(request_id="r", weights=Weights(version="b"), prompt=prompt, params=params, grammar=Grammar(kind="regex", text="yes")))
        executor.run()
    finally:
        torch.set_num_threads(before)
    assert isinstance(told[-1], SampleFinished)
    assert [event.token for event in told if isinstance(event, SampledToken)]
