"""Control: the newest of what was saved without a name is found without what has one."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    nameless = sa.text("name IS NULL")
    op.create_index("checkpoint_without_name", "checkpoint", ["kind", "id"], sqlite_where=nameless, postgresql_where=nameless)
