"""Evaluations: what came of the answers of those that have ended is counted once, and not whenever they are shown."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("evaluation", sa.Column("counts", sa.Text(), nullable=True))
    uncounted = sa.text("counts IS NULL")
    op.create_index("evaluation_uncounted", "evaluation", ["state"], sqlite_where=uncounted, postgresql_where=uncounted)
