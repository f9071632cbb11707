"""What spans come to is kept in sums; the slowest, and those of a deployment or a version, served or failed, are found without the others."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_KEY = ("project", "began_us", "deployment_id", "kind", "status", "version")
_COUNTS = ("requests", "priced", "in_tokens", "cached_tokens", "out_tokens", "duration_us")
_COUNTED = """
INSERT INTO span_sum (project, began_us, deployment_id, kind, status, version,
    requests, priced, in_tokens, cached_tokens, out_tokens, duration_us, cost_usd)
SELECT project, started_us - started_us % 600000000, coalesce(deployment_id, ''), kind, status, version, count(*), count(cost_usd),
    sum(in_tokens), sum(cached_tokens), sum(out_tokens), coalesce(sum(duration_us), 0), coalesce(sum(cost_usd), 0)
FROM span GROUP BY project, started_us - started_us % 600000000, deployment_id, kind, status, version
"""


def upgrade() -> None:
    op.create_table(
        "span_sum",
        *(sa.Column(name, sa.BigInteger() if name == "began_us" else sa.Text(), nullable=False, autoincrement=False) for name in _KEY),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        sa.Column("cost_usd", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint(*_KEY),
    )
    op.execute(_COUNTED)
    _create_index("span_by_duration", ["project", "duration_us", "kind"], "duration_us IS NOT NULL")
    _create_index("span_by_deployment", ["project", "deployment_id", "started_us"], "deployment_id IS NOT NULL")
    op.create_index("span_by_version", "span", ["project", "version", "started_us"])
    _create_index("span_served", ["project", "started_us"], "kind != 'sample'")
    _create_index("span_failed", ["project", "started_us"], "status != 'ok'")


def _create_index(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "span", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
