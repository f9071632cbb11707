"""Managed training: jobs, what was measured of them and what happened to them."""

from sqlalchemy import Index, Table, UniqueConstraint

from bloomery.store.rows.columns import integer, metadata, real, string

job = Table(
    "job",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    string("method"),
    string("spec"),  # JSON of a JobSpec with nothing left open
    string("state"),
    string("reason", null=True),
    string("wanted"),  # run | pause | cancel: what its process is to do next
    integer("epoch"),  # counts the leases; only the newest counts
    string("runner", null=True),  # who has the lease
    integer("lease_until_us", null=True),
    string("lease_hash", null=True),  # hash of the key that its process has
    integer("deaths"),  # of its processes in a row, without a new step between two
    string("run_id", null=True),
    string("after_id", null=True),  # the job that it begins with
    string("cursor", null=True),  # of its loop, as its process wrote it
    string("progress"),  # JSON of a JobProgress
    string("result", null=True),  # JSON of a JobResult
    integer("created_us"),
    integer("updated_us"),
    integer("queued_us"),  # since when it waits: the order in which jobs get a process
    integer("due_us", null=True),  # until when it waits for no process, because its last ones died
    integer("started_us", null=True),
    integer("finished_us", null=True),
    UniqueConstraint("project", "name", name="job_name"),
    Index("job_by_project", "project", "created_us"),
    Index("job_by_state", "state", "queued_us"),
    Index("job_by_after", "after_id", "state"),
    Index("job_by_change", "updated_us", "id"),
)

job_point = Table(
    "job_point",
    metadata,
    string("project"),
    string("job_id", key=True),
    integer("step", key=True),
    string("name", key=True),
    real("value", null=True),  # NULL: not a finite number
    integer("created_us"),
    Index("job_point_by_time", "job_id", "created_us"),
)

job_event = Table(
    "job_event",
    metadata,
    string("project"),
    string("job_id", key=True),
    integer("number", key=True),
    string("key", null=True),  # of an event that is there once, however often it is told
    string("level"),  # info | warning | error
    string("message"),
    string("data"),  # JSON object
    integer("created_us"),
    Index("job_event_once", "job_id", "key", unique=True),
)

fine_tuning = Table(
    "fine_tuning",
    metadata,
    string("job_id", key=True),
    string("project"),
    string("asked"),  # JSON of a FineTune: the job in the words of OpenAI's contract
    string("result_file", null=True),  # written when the job that succeeded is looked at first
    Index("fine_tuning_by_project", "project", "job_id"),
)
