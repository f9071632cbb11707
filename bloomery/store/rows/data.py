"""Recorded traffic and judgements of it, data sets, and files with the uploads that they come of."""

from sqlalchemy import Index, Table, UniqueConstraint, text

from bloomery.store.rows.columns import integer, metadata, real, string

_PRICED, _TOOK, _DEPLOYED = (text(f"{name} IS NOT NULL") for name in ("cost_usd", "duration_us", "deployment_id"))
_SERVED, _FAILED = text("kind != 'sample'"), text("status != 'ok'")

span = Table(
    "span",
    metadata,
    string("id", key=True),
    string("project"),
    string("trace_id", null=True),
    string("parent_id", null=True),
    string("episode_id", null=True),
    string("session_id", null=True),
    string("kind"),  # chat | completion | embedding | sample
    string("name"),
    string("model"),  # as the caller named it
    string("deployment_id", null=True),
    string("revision_id", null=True),
    string("route_id", null=True),
    string("variant", null=True),
    string("version"),  # weights
    string("base_hash"),
    string("template_hash", null=True),
    string("status"),
    string("error_code", null=True),
    integer("started_us"),
    integer("ttft_us", null=True),
    integer("duration_us", null=True),
    integer("in_tokens"),
    integer("out_tokens"),
    integer("cached_tokens"),
    real("cost_usd", null=True),
    string("finish_reason", null=True),
    string("input_hash", null=True),
    string("output_hash", null=True),
    string("body_ref", null=True),  # blob with messages, token ids and log-probabilities
    string("tags"),  # JSON object
    string("consent"),  # none | eval | train
    string("redaction_ver"),
    integer("redacted"),  # 1: something was replaced, so the body holds no token ids or log-probabilities, which would spell it
    integer("seed", null=True),
    string("config_hash", null=True),  # sampling parameters and tools
    integer("retention_until_us", null=True),
    Index("span_by_project", "project", "started_us"),
    Index("span_by_episode", "project", "episode_id"),
    Index("span_by_retention", "retention_until_us"),
    Index("span_by_cost", "project", "cost_usd", sqlite_where=_PRICED, postgresql_where=_PRICED),
    Index("span_by_duration", "project", "duration_us", "kind", sqlite_where=_TOOK, postgresql_where=_TOOK),
    Index("span_by_deployment", "project", "deployment_id", "started_us", sqlite_where=_DEPLOYED, postgresql_where=_DEPLOYED),
    Index("span_by_version", "project", "version", "started_us"),
    Index("span_served", "project", "started_us", sqlite_where=_SERVED, postgresql_where=_SERVED),
    Index("span_failed", "project", "started_us", sqlite_where=_FAILED, postgresql_where=_FAILED),
)

span_sum = Table(
    "span_sum",  # what spans come to that began in the same ten minutes and agree in the rest of the key
    metadata,
    string("project", key=True),
    integer("began_us", key=True),  # where the ten minutes begin
    string("deployment_id", key=True),  # empty: asked of none
    string("kind", key=True),
    string("status", key=True),
    string("version", key=True),
    integer("requests"),
    integer("priced"),  # of them, those whose cost is known
    integer("in_tokens"),
    integer("cached_tokens"),
    integer("out_tokens"),
    integer("duration_us"),
    real("cost_usd"),
)

feedback = Table(
    "feedback",
    metadata,
    string("id", key=True),
    string("project"),
    string("target_kind"),  # span | episode
    string("target_id"),
    string("metric"),
    string("type"),  # bool | float | label | comment | demonstration | preference
    string("value"),  # JSON
    string("comment", null=True),
    string("source"),  # user | human_review | judge | code | api
    string("author", null=True),
    string("judge_version", null=True),
    integer("created_us"),
    Index("feedback_by_target", "project", "target_kind", "target_id"),
    Index("feedback_by_project", "project", "created_us"),
    Index("feedback_by_metric", "project", "metric", "created_us"),
)

dataset = Table(
    "dataset",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    integer("created_us"),
    UniqueConstraint("project", "name", name="dataset_name"),
)

dataset_version = Table(
    "dataset_version",
    metadata,
    string("id", key=True),
    string("project"),
    string("dataset_id"),
    integer("number"),
    string("recipe"),  # JSON: how it was made
    string("recipe_hash"),
    string("manifest"),  # hash over its items: the content's identity
    string("parent", null=True),
    string("counts"),  # JSON: rows by split and by curation stage
    string("key"),  # blob of the rows
    integer("created_us"),
    string("kind", null=True),  # of its rows; null is `chat`, the only one there was
    string("rejected_key", null=True),  # blob of the rows that an import skipped
    UniqueConstraint("dataset_id", "number", name="dataset_version_number"),
    Index("dataset_version_manifest", "dataset_id", "manifest"),
)

dataset_item = Table(
    "dataset_item",
    metadata,
    string("project"),
    string("version_id", key=True),
    string("item_hash", key=True),
    integer("position"),
    string("split"),
    string("source_span", null=True),
    string("label_source", null=True),
    Index("dataset_item_by_hash", "project", "item_hash"),
)

file = Table(
    "file",
    metadata,
    string("id", key=True),
    string("project"),
    string("filename"),
    string("purpose"),
    string("kind", null=True),  # of its rows
    integer("size_bytes"),
    string("key"),  # blob of its bytes
    integer("created_us"),
    integer("expires_us", null=True),
    Index("file_by_project", "project", "id"),
    Index("file_by_expiry", "expires_us"),
)

upload = Table(
    "upload",
    metadata,
    string("id", key=True),
    string("project"),
    string("given"),  # JSON of a NewUpload
    string("state"),  # pending | completed | cancelled
    string("file_id", null=True),  # what came of it
    integer("created_us"),
    integer("expires_us"),  # its parts are forgotten then
    Index("upload_by_expiry", "expires_us"),
)

upload_part = Table(
    "upload_part",
    metadata,
    string("id", key=True),
    string("project"),
    string("upload_id"),
    string("key"),  # blob of its bytes
    integer("size_bytes"),
    integer("created_us"),
    Index("upload_part_by_upload", "upload_id"),
)
