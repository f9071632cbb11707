"""What happened, whoever says so, numbered in one line."""

from sqlalchemy import Column, Index, Integer, Table

from bloomery.store.rows.columns import integer, metadata, string

event = Table(
    "event",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    string("project"),
    string("kind"),
    string("subject"),  # id of what it is about
    string("data"),  # JSON object
    integer("created_us"),
    Index("event_by_subject", "subject"),
    # Without it SQLite would hand out the number of a deleted last row again, and a reader's cursor would skip an event.
    sqlite_autoincrement=True,
)
