"""Control: evals of OpenAI's contract, and which evaluations are runs of them."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "openai_eval",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("given", sa.Text(), nullable=False),
        sa.Column("graders", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("openai_eval_by_creation", "openai_eval", ["project", "created_us"])
    op.create_index("openai_eval_by_update", "openai_eval", ["project", "updated_us"])
    op.create_table(
        "openai_eval_run",
        sa.Column("evaluation_id", sa.Text(), primary_key=True),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("eval_id", sa.Text(), nullable=False),
        sa.Column("asked", sa.Text(), nullable=False),
        sa.Column("gives_rows", sa.BigInteger(), nullable=False),
    )
    op.create_index("openai_eval_run_by_eval", "openai_eval_run", ["eval_id", "evaluation_id"])
