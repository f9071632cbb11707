"""What the tables promise to those who delete blobs, and to those who make the schema."""

import importlib
import pkgutil

from bloomery.store import rows


def test_every_table_that_names_weights_and_their_version_keeps_them() -> None:
    naming = {name for name, table in rows.metadata.tables.items() if {"key", "version"} <= set(table.columns.keys())}
    assert naming == {table.name for table in rows.WEIGHT_HOLDERS}


def test_the_schema_names_the_tables_of_every_module() -> None:
    for module in pkgutil.iter_modules(rows.__path__):
        importlib.import_module(f"{rows.__name__}.{module.name}")
    assert {name: getattr(rows, name) for name in rows.metadata.tables} == dict(rows.metadata.tables)
