"""What runners and the processes of jobs say, and what they are told: who has a job, with which key, how far it is and how it ended."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from bloomery.types.jobs import Job, JobPoint, JobProgress, JobResult
from bloomery.types.resources import Resource

MAX_REASON: Final = 4096
"""Characters of a message of a job, or of a reason."""
MAX_KEY: Final = 256

Wanted = Literal["run", "pause", "cancel"]
"""What the process of a job is to do."""


class ClaimJob(Resource):
    """A runner takes the job that has waited the longest, if there is one within `wait_s`."""

    runner: Annotated[str, Field(min_length=1, max_length=128)]
    wait_s: Annotated[float, Field(ge=0, le=30)] = 0.0
    token: Annotated[str, Field(min_length=32, max_length=128)] | None = None
    """The key that the lease is to have: a runner that did not hear the answer asks again with the same one, and is given the same job. None: the
    server draws it."""


class LentAgent(Resource):
    """An agent elsewhere, for the process of a job that trains it."""

    name: str
    url: str
    host: str
    port: int
    timeout_s: float


class Lease(Resource):
    """A job and the right to work at it: `token` is a key for all that its process does, as long as no other has the job."""

    job: Job
    token: str
    cursor: str | None
    """What the process before this one said last of where it stands."""
    lease_s: float
    """Whoever does not report within so many seconds has lost the job."""
    agent: LentAgent | None = None
    """That of its method, where the server still has it and the project may."""


class Order(Resource):
    """What a runner tells the process that it starts for a job."""

    url: str
    lease: Lease


class Claimed(Resource):
    """What a runner was given."""

    lease: Lease | None


class ReleaseJobs(Resource):
    """A runner that has just started says that none of its processes lives any more: what they worked at waits again."""

    runner: Annotated[str, Field(min_length=1, max_length=128)]


class EndedJob(Resource):
    """A runner says that the process of a job ended, and how."""

    epoch: Annotated[int, Field(ge=0, lt=1 << 63)]
    words: Annotated[str, Field(max_length=MAX_REASON)]


class Released(Resource):
    """Jobs that wait again."""

    jobs: list[str]


class FollowedJob(Resource):
    """A job and whose it is."""

    project: str
    job: Job


class FollowedJobs(Resource):
    """Jobs of all projects in the order in which they changed last."""

    data: list[FollowedJob]


class ReportJob(Resource):
    """What the process of a job says now and then: its lease lasts on, and what it did is stored. A step that is told twice counts once."""

    run: str | None = None
    progress: JobProgress | None = None
    cursor: Annotated[str, Field(max_length=1 << 20)] | None = None
    """Where its loop stands: whoever goes on with the job is given it with the lease."""
    points: Annotated[list[JobPoint], Field(max_length=10_000)] = Field(default_factory=list)
    events: Annotated[list["NewJobEvent"], Field(max_length=1000)] = Field(default_factory=list)


class NewJobEvent(Resource):
    """An event to note; of one `key` a job has one event, however often its process begins again."""

    level: Literal["info", "warning", "error"] = "info"
    message: Annotated[str, Field(max_length=MAX_REASON)]
    data: dict[str, Any] = Field(default_factory=dict)
    key: Annotated[str, Field(max_length=MAX_KEY)] | None = None


class Reported(Resource):
    """What the job is to do."""

    wanted: Wanted


class FinishJob(Resource):
    """The last thing that the process of a job says."""

    state: Literal["succeeded", "failed", "paused", "cancelled"]
    reason: Annotated[str, Field(max_length=MAX_REASON)] | None = None
    result: JobResult | None = None
