"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "project",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last_used_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash", name="api_key_hash"),
    )
    op.create_table(
        "alias",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("contract", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("target_id", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("project", "contract", "name"),
    )
    op.create_index("alias_target", "alias", ["kind", "target_id"])
    op.create_table(
        "base_model",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("project", "alias"),
    )
    op.create_table(
        "session",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("sdk_version", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("heartbeat_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("finished_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("session_by_project", "session", ["project", "created_us"])
    op.create_table(
        "run",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=False),
        sa.Column("lora", sa.Text(), nullable=False),
        sa.Column("micro_batch_tokens", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("first_seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("settled_seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("digest_seq", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("updated_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("run_by_project", "run", ["project", "created_us"])
    op.create_index("run_by_session", "run", ["session_id"])
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("ttl_s", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("expires_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "seq", "kind", name="checkpoint_once"),
    )
    op.create_index("checkpoint_by_project", "checkpoint", ["project", "created_us"])
    op.create_index("checkpoint_by_run", "checkpoint", ["run_id", "kind", "name"])
    op.create_index("checkpoint_by_version", "checkpoint", ["version"])
    op.create_table(
        "run_metric",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq", "name"),
    )
    op.create_table(
        "sampling_session",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("session_id", "seq", name="sampling_session_once"),
    )
    op.create_table(
        "deployment",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("updated_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("project", "name", name="deployment_name"),
    )
    op.create_table(
        "revision",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("deployment_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("updated_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("deployment_id", "number", name="revision_number"),
    )
    op.create_table(
        "span",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("trace_id", sa.Text(), nullable=True),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("episode_id", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("deployment_id", sa.Text(), nullable=True),
        sa.Column("revision_id", sa.Text(), nullable=True),
        sa.Column("route_id", sa.Text(), nullable=True),
        sa.Column("variant", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("base_hash", sa.Text(), nullable=False),
        sa.Column("template_hash", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("started_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("ttft_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("duration_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("in_tokens", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("out_tokens", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("cost_usd", sa.Float(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("input_hash", sa.Text(), nullable=True),
        sa.Column("output_hash", sa.Text(), nullable=True),
        sa.Column("body_ref", sa.Text(), nullable=True),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("consent", sa.Text(), nullable=False),
        sa.Column("redaction_ver", sa.Text(), nullable=False),
        sa.Column("redacted", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seed", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.Column("config_hash", sa.Text(), nullable=True),
        sa.Column("retention_until_us", sa.BigInteger(), autoincrement=False, nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("span_by_episode", "span", ["project", "episode_id"])
    op.create_index("span_by_project", "span", ["project", "started_us"])
    op.create_index("span_by_retention", "span", ["retention_until_us"])
    op.create_table(
        "feedback",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("target_kind", sa.Text(), nullable=False),
        sa.Column("target_id", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=True),
        sa.Column("judge_version", sa.Text(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("feedback_by_project", "feedback", ["project", "created_us"])
    op.create_index("feedback_by_target", "feedback", ["project", "target_kind", "target_id"])
    op.create_table(
        "dataset",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("project", "name", name="dataset_name"),
    )
    op.create_table(
        "dataset_version",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_hash", sa.Text(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=True),
        sa.Column("counts", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("dataset_id", "number", name="dataset_version_number"),
    )
    op.create_index("dataset_version_manifest", "dataset_version", ["dataset_id", "manifest"])
    op.create_table(
        "dataset_item",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("version_id", sa.Text(), nullable=False),
        sa.Column("item_hash", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("source_span", sa.Text(), nullable=True),
        sa.Column("label_source", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("version_id", "item_hash"),
    )
    op.create_index("dataset_item_by_hash", "dataset_item", ["project", "item_hash"])
    op.create_table(
        "event",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sqlite_autoincrement=True,
    )
