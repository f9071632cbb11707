"""The Training API: keys that expire."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("expires_us", sa.BigInteger(), nullable=True))
    op.create_index("api_key_name", "api_key", ["project", "name"], unique=True)
    op.add_column("session", sa.Column("display_name", sa.Text(), nullable=True))
    op.add_column("checkpoint", sa.Column("published_us", sa.BigInteger(), nullable=True))
    op.add_column("sampling_session", sa.Column("follows_run", sa.Text(), nullable=True))
    op.add_column("sampling_session", sa.Column("follows_seq", sa.BigInteger(), nullable=True))
    op.add_column("sampling_session", sa.Column("clones", sa.BigInteger(), nullable=True))
    op.create_index("sampling_session_follows", "sampling_session", ["follows_run"])
    op.create_table(
        "custom_loss",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_id", "seq", name="custom_loss_once"),
    )
