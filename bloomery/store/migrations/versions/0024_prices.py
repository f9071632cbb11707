"""Deployments say what their tokens cost, and the dearest of their requests are found without the others."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("deployment", sa.Column("price", sa.Text(), nullable=True))
    known = sa.text("cost_usd IS NOT NULL")
    op.create_index("span_by_cost", "span", ["project", "cost_usd"], sqlite_where=known, postgresql_where=known)
