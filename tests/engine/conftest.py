"""The model that the engines of these tests hold."""

from pathlib import Path

import pytest

from tests.models.builders import saved


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 64 wide, random, as `save_pretrained` writes it."""
    return saved("qwen3", tmp_path_factory.mktemp("model"))
