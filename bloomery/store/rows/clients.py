"""What SDK clients have here: their sessions, and what those sample from and train with."""

from sqlalchemy import Index, Table, UniqueConstraint

from bloomery.store.rows.columns import integer, metadata, string

session = Table(
    "session",
    metadata,
    string("id", key=True),
    string("project"),
    string("tags"),  # JSON list
    string("user_metadata"),  # JSON object
    string("sdk_version"),
    integer("created_us"),
    integer("heartbeat_us"),
    integer("finished_us", null=True),
    string("finish_reason", null=True),
    string("display_name", null=True),
    Index("session_by_project", "project", "created_us"),
)

sampling_session = Table(
    "sampling_session",
    metadata,
    string("id", key=True),
    string("project"),
    string("session_id", null=True),
    integer("seq", null=True),  # the session's own number for it
    string("base_model"),
    string("base_hash"),
    string("model_path", null=True),
    string("version"),
    string("key", null=True),  # blob of the weights; None: the base itself, or weights that it let go
    integer("created_us"),
    string("follows_run", null=True),  # in flight: the run whose newer weights it takes over
    integer("follows_seq", null=True),  # and the operation that saved those it has
    integer("clones", null=True),  # clients that were given a number beside the first
    integer("asked_us", null=True),  # when it was last asked, give or take the time between two rounds of housekeeping; None: never
    integer("gone_us", null=True),  # since when it holds nothing any more
    UniqueConstraint("session_id", "seq", name="sampling_session_once"),
    Index("sampling_session_follows", "follows_run"),
    Index("sampling_session_by_key", "key"),
)

custom_loss = Table(
    "custom_loss",
    metadata,
    string("id", key=True),
    string("project"),
    string("session_id"),
    integer("seq"),  # the session's own number for it
    string("name"),
    string("definition"),  # base64 of the msgpack of a CustomLoss; JSON has no infinity
    integer("created_us"),
    UniqueConstraint("session_id", "seq", name="custom_loss_once"),
)
