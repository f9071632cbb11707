"""Control: evaluations, the models in them, what these answered and what graders said of it."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluation",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=True),
        sa.Column("rows_key", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("graders", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=True),
        sa.Column("finished_us", sa.BigInteger(), nullable=True),
        sa.UniqueConstraint("project", "name", name="evaluation_name"),
    )
    op.create_index("evaluation_by_project", "evaluation", ["project", "created_us"])
    op.create_index("evaluation_by_state", "evaluation", ["state", "created_us"])
    op.create_index("evaluation_by_rows", "evaluation", ["project", "manifest"])
    op.create_table(
        "evaluation_model",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("evaluation_id", sa.Text(), nullable=False),
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=True),
        sa.Column("key", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("evaluation_id", "place"),
    )
    op.create_index("evaluation_model_by_key", "evaluation_model", ["key"])
    op.create_table(
        "evaluation_answer",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("evaluation_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("given", sa.BigInteger(), nullable=False),
        sa.Column("latency_us", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("evaluation_id", "number"),
    )
    op.create_table(
        "evaluation_score",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("evaluation_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("grader", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("passed", sa.BigInteger(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("evaluation_id", "number", "grader"),
    )
