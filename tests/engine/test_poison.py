"""Operations that kill every engine: they fail in the end, and nobody else notices more than a delay."""

import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from bloomery.engine.ledger import MAX_DEATHS, MAX_REPLAY_DEATHS
from bloomery.types.operations import (
    CheckpointResult,
    Failed,
    ForwardBackwardResult,
    Operation,
    OptimStepResult,
    Rejected,
    Result,
    SaveCheckpoint,
    effect_of_failure,
)
from bloomery.types.protocol import CheckpointWritten, FromEngine, OpenRun, OperationDone, RunOpened
from tests.engine.harness import Api, Engine, engine, history, learn, spec, step

SAVE = SaveCheckpoint(key="checkpoints/run-a/named.safetensors")


@pytest.fixture
def reference(model: Path, tmp_path: Path) -> CheckpointResult:
    """What an undisturbed engine holds after four steps of `run-a`."""
    (tmp_path / "undisturbed").mkdir()
    with engine(model, tmp_path / "undisturbed") as one:
        survivor = Survivor(one, {"run-a": (0, [*history(4), SAVE])})
        survivor.finish()
    result = survivor.results["run-a", 8]
    assert isinstance(result, CheckpointResult)
    return result


class Survivor:
    """An api that lives through its engine's deaths: it opens runs where their checkpoints are and sends what has no result."""

    def __init__(self, one: Engine, histories: dict[str, tuple[int, list[Operation]]]) -> None:
        self.engine, self.histories = one, histories
        self.results: dict[tuple[str, int], Result] = {}
        self.restored: dict[str, tuple[str | None, int]] = {run_id: (None, first - 1) for run_id, (first, _) in histories.items()}
        self.refused: dict[str, str] = {}
        self.deaths: list[int] = []
        """Exit statuses."""

    def finish(self) -> None:
        """Until every operation has a result, or its run was given up."""
        while self.missing():
            with self.engine.connect() as api, suppress(EOFError, ConnectionError):
                self.begun()
                self._converse(api)
            if self.missing():
                self.deaths.append(self.engine.died())
                self.engine.start()

    def begun(self) -> None:
        """An engine listens."""

    def missing(self) -> list[tuple[str, int]]:
        wanted = [(run_id, first + at) for run_id, (first, operations) in self.histories.items() for at in range(len(operations))]
        return [operation for operation in wanted if operation not in self.results and operation[0] not in self.refused]

    def _converse(self, api: Api) -> None:
        for run_id, (first, operations) in self.histories.items():
            key, last = self.restored[run_id]
            api.send(OpenRun(spec=spec(run_id), checkpoint=key, last_seq=last))
            for seq in range(last + 1, first + len(operations)):
                known = self.results.get((run_id, seq))
                operation = operations[seq - first]
                if isinstance(known, Failed):
                    operation = Rejected(message=known.message, category=known.category, effect=effect_of_failure(operation))
                api.execute(seq, operation, run_id=run_id, replay=known is not None)
        while self.missing():
            self._take(api.receive())

    def _take(self, message: FromEngine) -> None:
        match message:
            case OperationDone(run_id=run_id, seq=seq, result=result):
                self.results[run_id, seq] = result
            case CheckpointWritten(run_id=run_id, seq=seq, key=key):
                self.restored[run_id] = (key, seq)
            case RunOpened(run_id=run_id, error=str(error)):
                self.refused[run_id] = error


@pytest.mark.slow
def test_an_operation_that_kills_its_engine_twice_fails_and_harms_nobody_else(model, tmp_path, reference):
    poisoned = [learn(seed=1), step(), learn(seed=2), step(), learn(seed=3), step()]
    with engine(model, tmp_path, BLOOMERY_FAILPOINTS="engine.operation.102") as one:
        survivor = Survivor(one, {"run-p": (100, poisoned), "run-a": (0, [*history(4), SAVE])})
        survivor.finish()
    assert survivor.deaths == [-signal.SIGKILL] * 2
    assert survivor.results["run-a", 8].digest == reference.digest
    results = [survivor.results["run-p", seq] for seq in range(100, 106)]
    assert [type(result) for result in results] == [ForwardBackwardResult, OptimStepResult, Failed, Failed, ForwardBackwardResult, OptimStepResult]
    assert results[2].category == "server"
    assert "the engine died twice in operation 102 (forward_backward of 70 tokens, the longest sequence 40)" in results[2].message
    assert results[5].metrics["step"] == 2


@pytest.mark.slow
def test_a_segmentation_fault_in_the_middle_of_a_pass_is_no_other_death(model, tmp_path, reference):
    poisoned = [learn(seed=1), step(), learn(seed=2), step(), learn(seed=3), step()]
    with engine(model, tmp_path, BLOOMERY_FAILPOINTS="engine.pass.102!SIGSEGV") as one:
        survivor = Survivor(one, {"run-p": (100, poisoned), "run-a": (0, [*history(4), SAVE])})
        survivor.finish()
    assert survivor.deaths == [-signal.SIGSEGV] * 2
    assert survivor.results["run-a", 8].digest == reference.digest
    failed = {operation: result for operation, result in survivor.results.items() if isinstance(result, Failed)}
    assert list(failed) == [("run-p", 102), ("run-p", 103)]
    assert failed["run-p", 102].category == "server"
    assert "the engine died twice in operation 102" in failed["run-p", 102].message


SPARE_BYTES = 96 << 20


class Short(Survivor):
    """Its engines get little more memory than they have once they listen."""

    def begun(self) -> None:
        assert self.engine.process is not None
        pid = self.engine.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES,) * 2)


@pytest.mark.slow
def test_an_operation_for_which_there_is_no_memory_fails_and_harms_nobody_else(model, tmp_path, reference):
    # Admission looks at what the machine has, of which there is enough.
    hungry = [learn(seed=1), step(), learn([30_000], seed=2), learn(seed=3), step()]
    with engine(model, tmp_path) as one:
        survivor = Short(one, {"run-p": (100, hungry), "run-a": (0, [*history(4), SAVE])})
        survivor.finish()
    assert survivor.results["run-a", 8].digest == reference.digest
    assert isinstance(survivor.results["run-p", 102], Failed)
    assert survivor.results["run-p", 102].category == "server"
    assert "can't allocate memory" in survivor.results["run-p", 102].message
    assert survivor.deaths == []
    # A backward that failed takes the step with it, as any that fails.
    assert isinstance(survivor.results["run-p", 104], Failed)


@pytest.mark.slow
def test_a_pass_that_dies_with_several_in_it_condemns_the_culprit_alone(model, tmp_path):
    histories = {f"run-{name}": (first, history(3)) for name, first in (("p", 100), ("q", 200), ("r", 300))}
    with engine(model, tmp_path, BLOOMERY_FAILPOINTS="engine.pass.102") as one:
        survivor = Survivor(one, histories)
        survivor.finish()
    assert survivor.deaths == [-signal.SIGKILL] * 2
    failed = [operation for operation, result in survivor.results.items() if isinstance(result, Failed)]
    assert failed == [("run-p", 102), ("run-p", 103)]


@pytest.mark.slow
def test_a_replay_that_kills_every_engine_gives_the_run_up_and_not_the_others(model, tmp_path, reference):
    with engine(model, tmp_path, BLOOMERY_FAILPOINTS="engine.operation.101") as one:
        survivor = Survivor(one, {"run-p": (100, history(2)), "run-a": (0, [*history(4), SAVE])})
        # As if an earlier engine had survived it.
        survivor.results["run-p", 101] = OptimStepResult(metrics={})
        survivor.finish()
    assert len(survivor.deaths) == MAX_REPLAY_DEATHS
    assert "while it replayed operation 101 (optim_step)" in survivor.refused["run-p"]
    assert survivor.results["run-a", 8].digest == reference.digest


@pytest.mark.slow
def test_checkpoints_that_kill_every_engine_are_given_up_and_training_goes_on(model, tmp_path, reference):
    with engine(model, tmp_path, BLOOMERY_FAILPOINTS="engine.checkpoint.written") as one:
        survivor = Survivor(one, {"run-p": (100, history(2)), "run-a": (0, [*history(4), SAVE])})
        survivor.finish()
        assert len(survivor.deaths) == 2 * MAX_DEATHS
        assert survivor.restored == {"run-p": (None, 99), "run-a": (None, -1)}
        assert survivor.refused == {}
        assert survivor.results["run-a", 8].digest == reference.digest
        assert one.log().count("run run-a: each of the last two engines that wrote a checkpoint of it died") >= 1
