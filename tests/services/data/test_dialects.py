"""What is asked of the database is understood by SQLite and by Postgres alike."""

import re

import pytest
from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite

from bloomery.services.data.datasets import same_version


@pytest.mark.parametrize(
    ("dialect", "parent", "compared"),
    [
        (postgresql.dialect(), "version-1", r"IS NOT DISTINCT FROM %\(parent_1\)s"),
        (postgresql.dialect(), None, "IS NOT DISTINCT FROM NULL"),
        (sqlite.dialect(), "version-1", r"IS \?"),
        (sqlite.dialect(), None, "IS NULL"),
    ],
    ids=lambda value: value.name if isinstance(value, Dialect) else "",
)
def test_a_parent_that_may_be_missing_is_compared_as_each_dialect_can(dialect: Dialect, parent: str | None, compared: str) -> None:
    # After `IS` Postgres takes NULL and truth values, and no other.
    sql = str(same_version("dataset-1", "abc", parent).compile(dialect=dialect))
    assert re.search(f"parent {compared}", sql), sql
