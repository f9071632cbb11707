"""Stores for a chain: a folder, and a bucket of a server that speaks S3, started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.store.objects import Folder
from bloomery.types.objects import Objects
from tests.s3 import new_bucket, running_s3


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_s3(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


@pytest.fixture(params=["folder", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return Folder(tmp_path / "store") if request.param == "folder" else new_bucket(request.getfixturevalue("s3"))
