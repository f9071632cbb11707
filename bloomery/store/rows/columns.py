"""The kinds of columns that tables have, and the one schema that all tables are of."""

from sqlalchemy import BigInteger, Column, Float, MetaData, Text

metadata = MetaData()


def string(name: str, *, null: bool = False, key: bool = False) -> Column[str]:
    """Words, an id or JSON."""
    return Column(name, Text, nullable=null, primary_key=key)


def integer(name: str, *, null: bool = False, key: bool = False) -> Column[int]:
    """A number that the caller sets."""
    return Column(name, BigInteger, nullable=null, primary_key=key, autoincrement=False)


def real(name: str, *, null: bool = False) -> Column[float]:
    """A measured number."""
    return Column(name, Float, nullable=null)
