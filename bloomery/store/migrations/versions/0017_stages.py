"""Jobs know which job they begin with, so that those which wait for it are found when it ends."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("after_id", sa.Text(), nullable=True))
    op.create_index("job_by_after", "job", ["after_id", "state"])
