"""Runs, what they save and what is measured of them."""

from sqlalchemy import Index, Table, UniqueConstraint, text

from bloomery.store.rows.columns import integer, metadata, real, string

run = Table(
    "run",
    metadata,
    string("id", key=True),
    string("project"),
    string("name", null=True),
    string("session_id", null=True),
    string("base_model"),  # the name it was asked for by
    string("base_hash"),
    string("lora"),  # JSON of LoraSpec
    integer("micro_batch_tokens"),
    string("metadata"),  # JSON object
    string("state"),  # active | broken | copy
    string("error", null=True),
    integer("first_seq"),  # 0 when it began by loading a checkpoint, else 1
    integer("settled_seq"),  # results up to here are reflected in metrics and checkpoints
    integer("step"),  # optimizer steps taken
    string("digest", null=True),  # of the weights at the latest checkpoint, with its seq
    integer("digest_seq", null=True),
    integer("created_us"),
    integer("updated_us"),
    Index("run_by_project", "project", "created_us"),
    Index("run_by_session", "session_id"),
)

checkpoint = Table(
    "checkpoint",
    metadata,
    string("id", key=True),
    string("project"),
    string("run_id"),
    integer("seq"),  # the state after this operation
    string("kind"),  # auto | source (what the operation loaded) | named | snapshot | external
    string("name", null=True),  # None: automatic, or an ephemeral snapshot
    string("state"),  # pending | ready
    string("key"),  # blob; a pending snapshot's is ""
    string("digest", null=True),
    string("version", null=True),  # snapshots: hash of the manifest
    integer("size_bytes"),
    integer("step"),
    string("metadata"),  # JSON object
    integer("created_us"),
    integer("ttl_s", null=True),  # pending rows: expiry counts from completion
    integer("expires_us", null=True),
    integer("published_us", null=True),  # since when every project may read it
    UniqueConstraint("run_id", "seq", "kind", name="checkpoint_once"),
    Index("checkpoint_by_run", "run_id", "kind", "name"),
    Index("checkpoint_by_project", "project", "created_us"),
    Index("checkpoint_by_version", "version"),
    Index("checkpoint_by_key", "key"),
    Index("checkpoint_with_name", "kind", "id", sqlite_where=text("name IS NOT NULL"), postgresql_where=text("name IS NOT NULL")),
    Index("checkpoint_without_name", "kind", "id", sqlite_where=text("name IS NULL"), postgresql_where=text("name IS NULL")),
)

run_metric = Table(
    "run_metric",
    metadata,
    string("project"),
    string("run_id", key=True),
    integer("seq", key=True),
    string("name", key=True),
    integer("step"),
    real("value", null=True),  # NULL: not a finite number
    integer("created_us"),
)

rollout_step = Table(
    "rollout_step",
    metadata,
    string("project"),
    string("run_id", key=True),
    integer("step", key=True),
    string("hash"),  # of what was recorded
    string("key"),  # blob of it
    integer("groups"),
    integer("left_out"),
    integer("rollouts"),
    integer("failures"),
    integer("tokens"),
    real("reward_mean", null=True),
    real("reward_min", null=True),
    real("reward_max", null=True),
    integer("size_bytes"),
    integer("created_us"),
    Index("rollout_step_by_time", "created_us"),
)
