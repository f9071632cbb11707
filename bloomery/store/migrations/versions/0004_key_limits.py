"""Serving: what a key may use per minute."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("requests_per_minute", sa.BigInteger(), nullable=True))
    op.add_column("api_key", sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True))
