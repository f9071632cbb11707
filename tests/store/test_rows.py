"""What the tables promise to those who delete blobs."""

from bloomery.store import rows


def test_every_table_that_names_weights_and_their_version_keeps_them() -> None:
    naming = {name for name, table in rows.metadata.tables.items() if {"key", "version"} <= set(table.columns.keys())}
    assert naming == {table.name for table in rows.WEIGHT_HOLDERS}
