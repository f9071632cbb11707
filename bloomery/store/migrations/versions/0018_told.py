"""Control: what a job measured is found by when it was told, for whoever follows it."""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("job_point_by_time", "job_point", ["job_id", "created_us"])
