from pathlib import Path

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.up.keys import announce, development_key

PRESET = "tml-chosen-by-the-operator"


def test_the_first_start_makes_a_private_key_and_the_next_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    first, second = development_key(file, {}), development_key(file, {})
    assert first.value.startswith("tml-")
    assert (first.created, second.created) == (True, False)
    assert second.value == first.value == file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_preset_key_replaces_the_stored_one(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    development_key(file, {})
    preset = development_key(file, {"BLOOMERY_API_KEY": PRESET})
    assert preset == (PRESET, False, True, True)
    assert development_key(file, {"BLOOMERY_API_KEY": PRESET}) == (PRESET, False, True, False)
    assert file.read_text().strip() == PRESET
    assert file.stat().st_mode & 0o777 == 0o600


def test_up_says_when_a_preset_key_replaced_another_one(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    assert announce(development_key(file, {"BLOOMERY_API_KEY": PRESET}), file) == "API key: from BLOOMERY_API_KEY"
    other = {"BLOOMERY_API_KEY": f"{PRESET}-later"}
    assert (
        announce(development_key(file, other), file)
        == f"API key: from BLOOMERY_API_KEY, which replaced the one in {file}: that one is refused from now on"
    )
    assert announce(development_key(file, {}), file) == f"API key: see {file}"


def test_a_preset_key_of_a_new_directory_replaces_none(tmp_path: Path) -> None:
    assert development_key(tmp_path / "api_key", {"BLOOMERY_API_KEY": PRESET}) == (PRESET, False, True, False)


@pytest.mark.parametrize("value", ["sk-not-one-of-ours-at-all", "tml-short", "tml-with space in the middle", "tml-umlaut-ä-umlaut-ä"])
def test_a_preset_key_that_clients_would_refuse_is_refused_here(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidInput, match="must start with tml-"):
        development_key(tmp_path / "api_key", {"BLOOMERY_API_KEY": value})
    assert not (tmp_path / "api_key").exists()
