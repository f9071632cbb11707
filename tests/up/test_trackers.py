"""`--track`: what is refused at the door, and where trackers keep what they are told."""

from pathlib import Path

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.up import trackers
from bloomery.up.trackers import read

ROOT = Path("/data")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the packages were there, which are extras."""
    monkeypatch.setattr(trackers, "find_spec", lambda _: object())


def refused(options: list[str], jobs: int = 1) -> str:
    with pytest.raises(InvalidInput) as error:
        read(options, jobs, ROOT, {})
    return error.value.message


def test_a_tracker_whose_package_is_missing_is_refused_with_its_extra() -> None:
    assert refused(["wandb"]) == "--track wandb takes the package `wandb`: install bloomery[wandb]"


@pytest.mark.usefixtures("installed")
def test_what_makes_no_sense_is_refused() -> None:
    assert "--track takes mlflow, tensorboard, wandb" in refused(["clearml=x"])
    assert "each kind once" in refused(["wandb", "wandb=other"])
    assert "--jobs 0 runs none" in refused(["wandb"], jobs=0)
    assert "MLFLOW_TRACKING_URI" in refused(["mlflow"])


@pytest.mark.usefixtures("installed")
def test_each_kind_has_its_place() -> None:
    found = read(["tensorboard", "mlflow", "wandb"], 1, ROOT, {"MLFLOW_TRACKING_URI": "http://mlflow"})
    assert [tracker.target for tracker in found] == ["/data/tensorboard", "http://mlflow", "bloomery"]
    found = read(["tensorboard=events", "mlflow=sqlite:///m.db", "wandb=mine"], 1, ROOT, {})
    assert [tracker.target for tracker in found] == [str(Path("events").resolve()), "sqlite:///m.db", "mine"]
