"""Who calls: projects, the keys of their callers, the names they gave, and what repeated requests are answered."""

from sqlalchemy import Index, Table, UniqueConstraint

from bloomery.store.rows.columns import integer, metadata, string

DEFAULT_PROJECT = "default"

project = Table("project", metadata, string("id", key=True), string("name"), integer("created_us"))

api_key = Table(
    "api_key",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    string("hash"),  # hex of the key's hash; the key itself is stored nowhere
    string("scopes"),  # JSON list
    integer("created_us"),
    integer("last_used_us", null=True),
    integer("expires_us", null=True),
    integer("requests_per_minute", null=True),
    integer("tokens_per_minute", null=True),
    UniqueConstraint("hash", name="api_key_hash"),
    Index("api_key_name", "project", "name", unique=True),
)

alias = Table(
    "alias",
    metadata,
    string("project", key=True),
    string("contract", key=True),  # tinker | bloomery | ...
    string("name", key=True),
    string("kind"),  # run | deployment | ...
    string("target_id"),
    integer("created_us"),
    string("request_hash", null=True),  # of the request that made the target, where its repetition must be the same one
    Index("alias_target", "kind", "target_id"),
)

answered = Table(
    "answered",
    metadata,
    string("project", key=True),
    string("key_id", key=True),  # of the api key
    string("name", key=True),  # that the caller gave to the request
    string("request_hash"),
    string("answer", null=True),  # JSON; None: it was given, and is not to be given again
    integer("created_us"),
    Index("answered_by_time", "created_us"),
)
