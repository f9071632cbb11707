"""What somebody asks for by name is there, or he is told that it is not."""

from typing import Any

from sqlalchemy import Connection, Row, Select

from bloomery.types.errors import NotFound


def one_row(connection: Connection, query: Select[Any], what: str, *, field: str) -> Row[Any]:
    """The row of a query; NotFound of `what` where there is none. `field` is what named it."""
    row = connection.execute(query).first()
    if row is None:
        raise NotFound(f"no {what}", field=field)
    return row
