"""Control: batches of OpenAI's contract, and what was answered of each."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("asked", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("input_key", sa.Text(), nullable=True),
        sa.Column("input_bytes", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("problems", sa.Text(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("output_file", sa.Text(), nullable=True),
        sa.Column("error_file", sa.Text(), nullable=True),
        sa.Column("times", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("batch_by_project", "batch", ["project", "id"])
    op.create_index("batch_by_state", "batch", ["state", "id"])
    op.create_table(
        "batch_line",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("batch_id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("good", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("stop", sa.BigInteger(), nullable=False),
    )
