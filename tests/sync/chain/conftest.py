"""Stores for a chain: a folder, and a bucket of the server that speaks S3."""

from pathlib import Path

import pytest

from bloomery.store.objects import Folder
from bloomery.types.objects import Objects
from tests.s3 import new_bucket


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return Folder(tmp_path / "store") if request.param == "folder" else new_bucket(request.getfixturevalue("s3"))
