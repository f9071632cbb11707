"""Runs: the rollouts of their steps are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_COUNTS = ("groups", "left_out", "rollouts", "failures", "tokens")
_REWARDS = ("reward_mean", "reward_min", "reward_max")


def upgrade() -> None:
    op.create_table(
        "rollout_step",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Float(), nullable=True) for name in _REWARDS),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step"),
    )
