"""What is served under which name: base models and the revisions of deployments."""

from sqlalchemy import Table, UniqueConstraint

from bloomery.store.rows.columns import integer, metadata, string

base_model = Table(
    "base_model", metadata, string("project", key=True), string("alias", key=True), string("base_hash"), string("path"), integer("created_us")
)

deployment = Table(
    "deployment",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    string("base_model"),
    string("base_hash"),
    integer("created_us"),
    integer("updated_us"),
    string("price", null=True),  # JSON of a Price; None: nobody said
    UniqueConstraint("project", "name", name="deployment_name"),
)

revision = Table(
    "revision",
    metadata,
    string("id", key=True),
    string("project"),
    string("deployment_id"),
    integer("number"),
    string("version"),
    string("key", null=True),  # blob of the weights; None: the base itself
    string("state"),  # live | retired | ...
    string("evidence"),  # JSON object
    integer("created_us"),
    integer("updated_us"),
    UniqueConstraint("deployment_id", "number", name="revision_number"),
)
