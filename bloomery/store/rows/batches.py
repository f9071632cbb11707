"""Files of requests, and where the answer to each line lies."""

from sqlalchemy import Index, Table

from bloomery.store.rows.columns import integer, metadata, string

batch = Table(
    "batch",
    metadata,
    string("id", key=True),
    string("project"),
    string("key_id"),  # for whom it is answered
    string("asked"),  # JSON of a NewBatch
    string("state"),
    string("input_key", null=True),  # blob of its requests, until it has ended: their file may be deleted
    integer("input_bytes"),
    string("model", null=True),
    string("problems"),  # JSON list of BatchProblem
    integer("total"),
    integer("completed"),
    integer("failed"),
    string("output_file", null=True),
    string("error_file", null=True),
    string("times"),  # JSON: when it came to each of its states
    integer("created_us"),
    integer("expires_us"),
    Index("batch_by_project", "project", "id"),
    Index("batch_by_state", "state", "id"),
)

batch_line = Table(
    "batch_line",
    metadata,
    string("project"),
    string("batch_id", key=True),
    integer("number", key=True),  # of the request, counted from 0
    integer("good"),  # 1: it belongs into the output, 0: among the errors
    string("key"),  # blob with its answer
    integer("start"),  # where that lies in it
    integer("stop"),
)
