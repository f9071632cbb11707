"""The outbox: what happened, in one order, for whoever follows along."""

import json
from typing import Any, Final

from sqlalchemy import Connection, insert

from bloomery.store import rows
from bloomery.types.ids import now_us

_EVENT: Final = insert(rows.event)


def record_event(connection: Connection, project: str, kind: str, subject: str, **data: Any) -> None:
    """Add an event to the transaction that makes it true."""
    event = {"project": project, "kind": kind, "subject": subject, "data": json.dumps(data), "created_us": now_us()}
    connection.execute(_EVENT, event)
