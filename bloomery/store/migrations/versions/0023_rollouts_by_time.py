"""Runs whose rollouts became more are found by when."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("rollout_step_by_time", "rollout_step", ["created_us"])
