"""Control: what was saved under a name is found without what has none."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    named = sa.text("name IS NOT NULL")
    op.create_index("checkpoint_with_name", "checkpoint", ["kind", "id"], sqlite_where=named, postgresql_where=named)
