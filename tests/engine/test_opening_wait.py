"""Memory for a run itself: it is opened when others let go of theirs, and refused as its caller's error only where it would never fit."""

import math
from pathlib import Path

import pytest

from bloomery.config import EngineConfig, ModelConfig
from bloomery.engine.admission import base_bytes, opening_need
from bloomery.engine.hosted import CheckpointAfter
from bloomery.engine.memory import MEMORY_WAIT_S, Memory
from bloomery.engine.runs import HeldRuns
from bloomery.engine.shelf import BlobShelf
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import NO_KEYS
from bloomery.types.operations import LoraSpec, OptimStepResult, RunSpec
from bloomery.types.protocol import CloseRun, Execute, FromEngine, OpenRun, OperationDone, RunClosed, RunOpened
from tests.train import builders
from tests.train.builders import learn, step, supervised

MODEL = builders.decoder()
BASE = "b" * 32
ENOUGH = 1 << 40
ADAPTER, WHOLE = LoraSpec(rank=8, seed=1), LoraSpec(rank=0, seed=0)


class Stage:
    """The runs of an engine on a machine whose memory and clock the test holds."""

    def __init__(self, directory: Path) -> None:
        self.free, self.whole, self.now_s = ENOUGH, ENOUGH, 0.0
        self.free_for_operations = ENOUGH
        self.sent: list[FromEngine] = []
        served = ModelConfig(alias="small", path="", base_hash=BASE, dtype="float32", threads=1, socket="")
        (directory / "engines").mkdir(exist_ok=True)
        self.shelf = BlobShelf(Blobs(directory / "blobs"), MODEL, base_hash=BASE, numerics="n", keys=NO_KEYS)
        self.runs = HeldRuns(
            EngineConfig(data_dir=str(directory), model=served),
            MODEL,
            self.shelf,
            self.sent.append,
            CheckpointAfter(),
            memory=Memory(lambda device: self.free, lambda device: self.whole),
            operations_memory=Memory(lambda device: self.free_for_operations, lambda device: ENOUGH),
            clock_s=lambda: self.now_s,
        )

    def open(self, run_id: str, lora: LoraSpec, *, checkpoint: str | None = None, base_hash: str = BASE) -> None:
        spec = RunSpec(run_id=run_id, base_hash=base_hash, lora=lora, micro_batch_tokens=256)
        self.runs.obey(OpenRun(spec=spec, checkpoint=checkpoint, last_seq=-1))

    def work(self) -> None:
        """Until nobody can go on."""
        while self.runs.take_turn(begin=True):
            pass

    def answers(self, run_id: str) -> list[RunOpened]:
        return [message for message in self.sent if isinstance(message, RunOpened) and message.run_id == run_id]

    def trains(self, run_id: str) -> bool:
        """Whether it takes a step; and how everybody else waits for it."""
        first = self.runs.executed[run_id] + 1
        for seq, operation in enumerate([learn(supervised([12])), step()], first):
            self.runs.obey(Execute(run_id=run_id, seq=seq, operation=operation))
        self.work()
        results = [
            message.result for message in self.sent if isinstance(message, OperationDone) and (message.run_id, message.seq) == (run_id, first + 1)
        ]
        return [type(result) for result in results] == [OptimStepResult]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("lora", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_a_run_waits_for_memory_while_others_train_and_is_opened_when_there_is_some(stage: Stage, lora: LoraSpec) -> None:
    stage.open("run-2", ADAPTER)
    need = opening_need(lora, MODEL)
    stage.free = need.bytes - 1
    stage.open("run-1", lora)
    assert stage.answers("run-1") == []
    assert 0 < stage.runs.next_turn_in_s <= 1
    assert stage.runs.waits_for_memory
    stage.free = ENOUGH
    assert stage.trains("run-2")
    assert stage.answers("run-1") == [], "looked again too soon"
    stage.free, stage.now_s = need.bytes - 1, MEMORY_WAIT_S - 1
    stage.work()
    assert stage.answers("run-1") == []
    stage.free, stage.now_s = ENOUGH, MEMORY_WAIT_S
    assert stage.runs.next_turn_in_s == 0
    stage.work()
    assert stage.answers("run-1") == [RunOpened(run_id="run-1")]
    assert stage.runs.next_turn_in_s == math.inf
    assert stage.trains("run-1")


@pytest.mark.parametrize(("lora", "says"), [(ADAPTER, "a run of rank 8 needs about"), (WHOLE, "parameters (rank 0) needs about")])
def test_after_its_time_the_servers_error_says_what_lacked_and_asked_again_it_waits_again(stage: Stage, lora: LoraSpec, says: str) -> None:
    stage.free = 0
    stage.open("run-1", lora)
    while not stage.answers("run-1"):
        stage.work()
        stage.now_s += 7.0
    (refused,) = stage.answers("run-1")
    assert refused.fails == "server"
    for part in (says, "0.0 GB are free, and no more came free in 60 s", "Send its operations again"):
        assert part in str(refused.error)
    assert MEMORY_WAIT_S <= stage.now_s < MEMORY_WAIT_S + 15
    assert stage.runs.next_turn_in_s == math.inf
    stage.open("run-1", lora)
    stage.free = ENOUGH
    stage.now_s += 1
    stage.work()
    assert stage.answers("run-1")[1:] == [RunOpened(run_id="run-1")]


@pytest.mark.parametrize("lora", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_what_an_engine_that_does_nothing_else_could_not_hold_is_refused_at_once_as_the_callers(stage: Stage, lora: LoraSpec) -> None:
    stage.free, stage.whole = 0, opening_need(lora, MODEL).bytes + base_bytes(MODEL)
    stage.open("run-1", lora)
    assert stage.answers("run-1") == []
    stage.whole -= 1
    stage.open("run-1", lora)
    (refused,) = stage.answers("run-1")
    assert refused.fails == "user"
    assert "an engine that does nothing else has" in str(refused.error)
    assert "fewer parts of the model" in str(refused.error)
    assert stage.now_s == 0.0


def test_an_adapter_that_was_held_before_is_held_again(stage: Stage) -> None:
    stage.open("run-1", ADAPTER)
    assert stage.trains("run-1")
    stage.runs.obey(CloseRun(run_id="run-1"))
    (key,) = (message.key for message in stage.sent if hasattr(message, "key"))
    stage.free = 0
    stage.open("run-1", ADAPTER, checkpoint=key)
    assert stage.answers("run-1")[1:] == [RunOpened(run_id="run-1")]


def test_what_is_wrong_otherwise_is_said_without_waiting(stage: Stage) -> None:
    stage.free = 0
    stage.open("run-1", ADAPTER, base_hash="c" * 32)
    (refused,) = stage.answers("run-1")
    assert refused.fails is None
    assert "this engine holds" in str(refused.error)


def test_a_run_that_is_let_go_or_whose_api_went_away_is_not_opened_later(stage: Stage) -> None:
    stage.free = 0
    stage.open("run-1", ADAPTER)
    stage.runs.obey(CloseRun(run_id="run-1"))
    stage.open("run-2", ADAPTER)
    stage.runs.repeat()
    stage.free, stage.now_s = ENOUGH, 1.0
    assert stage.runs.next_turn_in_s == math.inf
    stage.work()
    assert stage.sent == [RunClosed(run_id="run-1")]


def test_nothing_is_opened_while_the_engine_is_drained(stage: Stage) -> None:
    stage.free = 0
    stage.open("run-1", ADAPTER)
    stage.free, stage.now_s = ENOUGH, 1.0
    assert not stage.runs.take_turn(begin=False)
    assert stage.answers("run-1") == []


def test_operations_of_a_run_wait_by_the_clock_of_those_who_wait_to_be_opened(stage: Stage) -> None:
    stage.open("run-1", ADAPTER)
    stage.free_for_operations = 0
    stage.runs.obey(Execute(run_id="run-1", seq=0, operation=learn(supervised([12]))))
    stage.work()
    assert 0 < stage.runs.next_turn_in_s <= 1
    stage.now_s = 1.0
    assert stage.runs.next_turn_in_s == 0
    stage.free_for_operations = ENOUGH
    stage.work()
    assert stage.runs.executed == {"run-1": 0}
