"""Upkeep: samplers that let go of weights, requests that may be repeated, and look-ups that read what they find and nothing else."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sampling_session", sa.Column("asked_us", sa.BigInteger(), nullable=True))
    op.add_column("sampling_session", sa.Column("gone_us", sa.BigInteger(), nullable=True))
    op.create_index("sampling_session_by_key", "sampling_session", ["key"])
    op.create_index("checkpoint_by_key", "checkpoint", ["key"])
    op.add_column("alias", sa.Column("request_hash", sa.Text(), nullable=True))
    op.create_index("feedback_by_metric", "feedback", ["project", "metric", "created_us"])
