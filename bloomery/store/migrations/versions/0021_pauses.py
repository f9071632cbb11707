"""Jobs whose processes die one behind the other get the next after a pause."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("due_us", sa.BigInteger(), nullable=True))
