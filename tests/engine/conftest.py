"""The model that the engines of these tests hold, an engine that they share, and what one that nobody disturbs makes of a history."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.types.operations import CheckpointResult, SaveCheckpoint
from tests.engine.harness import Engine, engine, history
from tests.models.builders import saved


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 64 wide, random, as `save_pretrained` writes it."""
    return saved("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine for the tests that leave nothing behind."""
    with engine(model, tmp_path_factory.mktemp("engine")) as one:
        yield one


@pytest.fixture(scope="module")
def references(shared: Engine) -> dict[int, CheckpointResult]:
    """What an undisturbed engine holds after four steps, by rank: of all parameters at 0."""
    return {rank: after_four_steps(shared, rank) for rank in (0, 8)}


def after_four_steps(undisturbed: Engine, rank: int) -> CheckpointResult:
    run_id = f"run-reference-{rank}"
    with undisturbed.connect() as api:
        api.open(run_id, rank=rank)
        api.execute(0, *history(4), SaveCheckpoint(key=f"checkpoints/{run_id}/end.safetensors"), run_id=run_id)
        done = api.done(8, run_id).result
        api.close_runs(run_id)
    assert isinstance(done, CheckpointResult)
    return done
