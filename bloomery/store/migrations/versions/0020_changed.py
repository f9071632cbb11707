"""Control: jobs are found by when they changed last, for whoever follows them, and the last change of all is known without a look at each."""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("job_by_change", "job", ["updated_us", "id"])
