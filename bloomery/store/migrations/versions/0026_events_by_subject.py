"""What happened to one thing is found without what happened to others."""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("event_by_subject", "event", ["subject"])
