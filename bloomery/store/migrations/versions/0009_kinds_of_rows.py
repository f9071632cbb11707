"""Data: versions of data sets say of which kind their rows are, and which rows of their files were rejected."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("dataset_version", sa.Column("kind", sa.Text(), nullable=True))
    op.add_column("dataset_version", sa.Column("rejected_key", sa.Text(), nullable=True))
