from pathlib import Path

from bloomery.config.data_dir import DEFAULT_DATA_DIR, DataDir
from bloomery.up.hints import command


def test_a_command_names_any_directory_but_the_default_one(tmp_path: Path) -> None:
    assert command("stop", DataDir(DEFAULT_DATA_DIR.expanduser().resolve())) == "bloomery stop"
    assert command("stop", DataDir(tmp_path / "my data")) == f"bloomery stop --data-dir '{tmp_path}/my data'"
