from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict, Corrupt, InvalidInput
from bloomery.up import layout


def test_a_new_directory_is_private_and_has_a_version(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "deep" / "data")
    layout.create(data)
    layout.bring_up_to_date(data)
    assert data.root.stat().st_mode & 0o777 == 0o700
    assert data.version.read_text() == f"{layout.CURRENT}\n"


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Conflict, match="not Bloomery's"):
        layout.create(DataDir(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    root = tmp_path / "file" / "data"
    root.parent.touch()
    with pytest.raises(InvalidInput, match=rf"^{root} cannot be made \(Not a directory\): give a directory that you may write as --data-dir$"):
        layout.create(DataDir(root))


def test_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.version.write_text(f"{layout.CURRENT + 1}\n")
    with pytest.raises(Conflict, match="upgrade Bloomery"):
        layout.bring_up_to_date(data)
    assert data.version.read_text() == f"{layout.CURRENT + 1}\n"


def test_a_damaged_version_is_told_apart(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.version.write_text("one")
    with pytest.raises(Corrupt, match="VERSION holds 'one'"):
        layout.bring_up_to_date(data)


def test_an_older_directory_takes_every_step_in_order(tmp_path: Path) -> None:
    data, steps = DataDir(tmp_path), []
    data.version.write_text("1\n")
    migrations = {1: lambda _: steps.append("1 to 2"), 2: lambda _: steps.append("2 to 3")}
    layout.bring_up_to_date(data, migrations, current=3)
    assert steps == ["1 to 2", "2 to 3"]
    assert data.version.read_text() == "3\n"


def test_a_step_that_failed_is_taken_again_and_those_before_it_are_not(tmp_path: Path) -> None:
    data, steps = DataDir(tmp_path), []
    data.version.write_text("1\n")

    def breaks_once(_: DataDir) -> None:
        steps.append("2 to 3")
        if steps.count("2 to 3") == 1:
            raise OSError("disk full")

    migrations = {1: lambda _: steps.append("1 to 2"), 2: breaks_once}
    with pytest.raises(OSError, match="disk full"):
        layout.bring_up_to_date(data, migrations, current=3)
    layout.bring_up_to_date(data, migrations, current=3)
    assert steps == ["1 to 2", "2 to 3", "2 to 3"]
