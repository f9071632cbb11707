"""Every table, in the SQL that SQLite and Postgres share.

Ids are TEXT, times are integer microseconds UTC (`*_us`, set by the caller: the database has no clock here), JSON is TEXT, and states change by
compare-and-swap (`changed`). Every row belongs to a project. Payloads never live here: rows hold blob keys.
"""

from sqlalchemy import BigInteger, Column, Connection, Float, Index, Integer, MetaData, Table, Text, UniqueConstraint, Update, text

metadata = MetaData()

DEFAULT_PROJECT = "default"


def _text(name: str, *, null: bool = False, key: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null, primary_key=key)


def _int(name: str, *, null: bool = False, key: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=null, primary_key=key, autoincrement=False)


project = Table("project", metadata, _text("id", key=True), _text("name"), _int("created_us"))

api_key = Table(
    "api_key",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _text("hash"),  # hex of the key's hash; the key itself is stored nowhere
    _text("scopes"),  # JSON list
    _int("created_us"),
    _int("last_used_us", null=True),
    _int("expires_us", null=True),
    _int("requests_per_minute", null=True),
    _int("tokens_per_minute", null=True),
    UniqueConstraint("hash", name="api_key_hash"),
    Index("api_key_name", "project", "name", unique=True),
)

alias = Table(
    "alias",
    metadata,
    _text("project", key=True),
    _text("contract", key=True),  # tinker | bloomery | ...
    _text("name", key=True),
    _text("kind"),  # run | deployment | ...
    _text("target_id"),
    _int("created_us"),
    _text("request_hash", null=True),  # of the request that made the target, where its repetition must be the same one
    Index("alias_target", "kind", "target_id"),
)

answered = Table(
    "answered",
    metadata,
    _text("project", key=True),
    _text("key_id", key=True),  # of the api key
    _text("name", key=True),  # that the caller gave to the request
    _text("request_hash"),
    _text("answer", null=True),  # JSON; None: it was given, and is not to be given again
    _int("created_us"),
    Index("answered_by_time", "created_us"),
)

base_model = Table(
    "base_model", metadata, _text("project", key=True), _text("alias", key=True), _text("base_hash"), _text("path"), _int("created_us")
)

session = Table(
    "session",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("tags"),  # JSON list
    _text("user_metadata"),  # JSON object
    _text("sdk_version"),
    _int("created_us"),
    _int("heartbeat_us"),
    _int("finished_us", null=True),
    _text("finish_reason", null=True),
    _text("display_name", null=True),
    Index("session_by_project", "project", "created_us"),
)

run = Table(
    "run",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name", null=True),
    _text("session_id", null=True),
    _text("base_model"),  # the name it was asked for by
    _text("base_hash"),
    _text("lora"),  # JSON of LoraSpec
    _int("micro_batch_tokens"),
    _text("metadata"),  # JSON object
    _text("state"),  # active | broken | copy
    _text("error", null=True),
    _int("first_seq"),  # 0 when it began by loading a checkpoint, else 1
    _int("settled_seq"),  # results up to here are reflected in metrics and checkpoints
    _int("step"),  # optimizer steps taken
    _text("digest", null=True),  # of the weights at the latest checkpoint, with its seq
    _int("digest_seq", null=True),
    _int("created_us"),
    _int("updated_us"),
    Index("run_by_project", "project", "created_us"),
    Index("run_by_session", "session_id"),
)

checkpoint = Table(
    "checkpoint",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("run_id"),
    _int("seq"),  # the state after this operation
    _text("kind"),  # auto | source (what the operation loaded) | named | snapshot | external
    _text("name", null=True),  # None: automatic, or an ephemeral snapshot
    _text("state"),  # pending | ready
    _text("key"),  # blob; a pending snapshot's is ""
    _text("digest", null=True),
    _text("version", null=True),  # snapshots: hash of the manifest
    _int("size_bytes"),
    _int("step"),
    _text("metadata"),  # JSON object
    _int("created_us"),
    _int("ttl_s", null=True),  # pending rows: expiry counts from completion
    _int("expires_us", null=True),
    _int("published_us", null=True),  # since when every project may read it
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
    _text("project"),
    _text("run_id", key=True),
    _int("seq", key=True),
    _text("name", key=True),
    _int("step"),
    Column("value", Float, nullable=True),  # NULL: not a finite number
    _int("created_us"),
)

sampling_session = Table(
    "sampling_session",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("session_id", null=True),
    _int("seq", null=True),  # the session's own number for it
    _text("base_model"),
    _text("base_hash"),
    _text("model_path", null=True),
    _text("version"),
    _text("key", null=True),  # blob of the weights; None: the base itself, or weights that it let go
    _int("created_us"),
    _text("follows_run", null=True),  # in flight: the run whose newer weights it takes over
    _int("follows_seq", null=True),  # and the operation that saved those it has
    _int("clones", null=True),  # clients that were given a number beside the first
    _int("asked_us", null=True),  # when it was last asked, give or take the time between two rounds of housekeeping; None: never
    _int("gone_us", null=True),  # since when it holds nothing any more
    UniqueConstraint("session_id", "seq", name="sampling_session_once"),
    Index("sampling_session_follows", "follows_run"),
    Index("sampling_session_by_key", "key"),
)

custom_loss = Table(
    "custom_loss",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("session_id"),
    _int("seq"),  # the session's own number for it
    _text("name"),
    _text("definition"),  # base64 of the msgpack of a CustomLoss; JSON has no infinity
    _int("created_us"),
    UniqueConstraint("session_id", "seq", name="custom_loss_once"),
)

deployment = Table(
    "deployment",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _text("base_model"),
    _text("base_hash"),
    _int("created_us"),
    _int("updated_us"),
    UniqueConstraint("project", "name", name="deployment_name"),
)

revision = Table(
    "revision",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("deployment_id"),
    _int("number"),
    _text("version"),
    _text("key", null=True),  # blob of the weights; None: the base itself
    _text("state"),  # live | retired | ...
    _text("evidence"),  # JSON object
    _int("created_us"),
    _int("updated_us"),
    UniqueConstraint("deployment_id", "number", name="revision_number"),
)

span = Table(
    "span",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("trace_id", null=True),
    _text("parent_id", null=True),
    _text("episode_id", null=True),
    _text("session_id", null=True),
    _text("kind"),  # chat | completion | sample | tool
    _text("name"),
    _text("model"),  # as the caller named it
    _text("deployment_id", null=True),
    _text("revision_id", null=True),
    _text("route_id", null=True),
    _text("variant", null=True),
    _text("version"),  # weights
    _text("base_hash"),
    _text("template_hash", null=True),
    _text("status"),
    _text("error_code", null=True),
    _int("started_us"),
    _int("ttft_us", null=True),
    _int("duration_us", null=True),
    _int("in_tokens"),
    _int("out_tokens"),
    _int("cached_tokens"),
    Column("cost_usd", Float, nullable=True),
    _text("finish_reason", null=True),
    _text("input_hash", null=True),
    _text("output_hash", null=True),
    _text("body_ref", null=True),  # blob with messages, token ids and log-probabilities
    _text("tags"),  # JSON object
    _text("consent"),  # none | eval | train
    _text("redaction_ver"),
    _int("redacted"),  # 1: something was replaced, so the body holds no token ids or log-probabilities, which would spell it
    _int("seed", null=True),
    _text("config_hash", null=True),  # sampling parameters and tools
    _int("retention_until_us", null=True),
    Index("span_by_project", "project", "started_us"),
    Index("span_by_episode", "project", "episode_id"),
    Index("span_by_retention", "retention_until_us"),
)

feedback = Table(
    "feedback",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("target_kind"),  # span | episode
    _text("target_id"),
    _text("metric"),
    _text("type"),  # bool | float | label | comment | demonstration | preference
    _text("value"),  # JSON
    _text("comment", null=True),
    _text("source"),  # user | human_review | judge | code | api
    _text("author", null=True),
    _text("judge_version", null=True),
    _int("created_us"),
    Index("feedback_by_target", "project", "target_kind", "target_id"),
    Index("feedback_by_project", "project", "created_us"),
    Index("feedback_by_metric", "project", "metric", "created_us"),
)

dataset = Table(
    "dataset",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _int("created_us"),
    UniqueConstraint("project", "name", name="dataset_name"),
)

dataset_version = Table(
    "dataset_version",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("dataset_id"),
    _int("number"),
    _text("recipe"),  # JSON: how it was made
    _text("recipe_hash"),
    _text("manifest"),  # hash over its items: the content's identity
    _text("parent", null=True),
    _text("counts"),  # JSON: rows by split and by curation stage
    _text("key"),  # blob of the rows
    _int("created_us"),
    _text("kind", null=True),  # of its rows; null is `chat`, the only one there was
    _text("rejected_key", null=True),  # blob of the rows that an import skipped
    UniqueConstraint("dataset_id", "number", name="dataset_version_number"),
    Index("dataset_version_manifest", "dataset_id", "manifest"),
)

dataset_item = Table(
    "dataset_item",
    metadata,
    _text("project"),
    _text("version_id", key=True),
    _text("item_hash", key=True),
    _int("position"),
    _text("split"),
    _text("source_span", null=True),
    _text("label_source", null=True),
    Index("dataset_item_by_hash", "project", "item_hash"),
)

grader = Table(
    "grader",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _int("number"),
    _text("hash"),  # of what decides its scores
    _text("spec"),  # JSON
    _int("created_us"),
    _text("waiver", null=True),  # JSON: why attacks of it count for nothing, and who says so
    UniqueConstraint("project", "name", "number", name="grader_number"),
    UniqueConstraint("project", "name", "hash", name="grader_once"),
)

calibration = Table(
    "calibration",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("grader_hash"),
    _text("card"),  # JSON
    _int("created_us"),
    Index("calibration_by_grader", "project", "grader_hash", "created_us"),
)

grader_attack = Table(
    "grader_attack",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("grader_hash"),
    _text("manifest"),  # of the rows' version
    _text("split"),
    _text("report"),  # JSON
    _int("created_us"),
    Index("grader_attack_by_grader", "project", "grader_hash", "created_us"),
)

job = Table(
    "job",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _text("method"),
    _text("spec"),  # JSON of a JobSpec with nothing left open
    _text("state"),
    _text("reason", null=True),
    _text("wanted"),  # run | pause | cancel: what its process is to do next
    _int("epoch"),  # counts the leases; only the newest counts
    _text("runner", null=True),  # who has the lease
    _int("lease_until_us", null=True),
    _text("lease_hash", null=True),  # hash of the key that its process has
    _int("deaths"),  # of its processes in a row, without a new step between two
    _text("run_id", null=True),
    _text("after_id", null=True),  # the job that it begins with
    _text("cursor", null=True),  # of its loop, as its process wrote it
    _text("progress"),  # JSON of a JobProgress
    _text("result", null=True),  # JSON of a JobResult
    _int("created_us"),
    _int("updated_us"),
    _int("queued_us"),  # since when it waits: the order in which jobs get a process
    _int("started_us", null=True),
    _int("finished_us", null=True),
    UniqueConstraint("project", "name", name="job_name"),
    Index("job_by_project", "project", "created_us"),
    Index("job_by_state", "state", "queued_us"),
    Index("job_by_after", "after_id", "state"),
    Index("job_by_change", "updated_us", "id"),
)

job_point = Table(
    "job_point",
    metadata,
    _text("project"),
    _text("job_id", key=True),
    _int("step", key=True),
    _text("name", key=True),
    Column("value", Float, nullable=True),  # NULL: not a finite number
    _int("created_us"),
    Index("job_point_by_time", "job_id", "created_us"),
)

job_event = Table(
    "job_event",
    metadata,
    _text("project"),
    _text("job_id", key=True),
    _int("number", key=True),
    _text("key", null=True),  # of an event that is there once, however often it is told
    _text("level"),  # info | warning | error
    _text("message"),
    _text("data"),  # JSON object
    _int("created_us"),
    Index("job_event_once", "job_id", "key", unique=True),
)

file = Table(
    "file",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("filename"),
    _text("purpose"),
    _text("kind", null=True),  # of its rows
    _int("size_bytes"),
    _text("key"),  # blob of its bytes
    _int("created_us"),
    _int("expires_us", null=True),
    Index("file_by_project", "project", "id"),
    Index("file_by_expiry", "expires_us"),
)

upload = Table(
    "upload",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("given"),  # JSON of a NewUpload
    _text("state"),  # pending | completed | cancelled
    _text("file_id", null=True),  # what came of it
    _int("created_us"),
    _int("expires_us"),  # its parts are forgotten then
    Index("upload_by_expiry", "expires_us"),
)

upload_part = Table(
    "upload_part",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("upload_id"),
    _text("key"),  # blob of its bytes
    _int("size_bytes"),
    _int("created_us"),
    Index("upload_part_by_upload", "upload_id"),
)

fine_tuning = Table(
    "fine_tuning",
    metadata,
    _text("job_id", key=True),
    _text("project"),
    _text("asked"),  # JSON of a FineTune: the job in the words of OpenAI's contract
    _text("result_file", null=True),  # written when the job that succeeded is looked at first
    Index("fine_tuning_by_project", "project", "job_id"),
)

batch = Table(
    "batch",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("key_id"),  # for whom it is answered
    _text("asked"),  # JSON of a NewBatch
    _text("state"),
    _text("input_key", null=True),  # blob of its requests, until it has ended: their file may be deleted
    _int("input_bytes"),
    _text("model", null=True),
    _text("problems"),  # JSON list of BatchProblem
    _int("total"),
    _int("completed"),
    _int("failed"),
    _text("output_file", null=True),
    _text("error_file", null=True),
    _text("times"),  # JSON: when it came to each of its states
    _int("created_us"),
    _int("expires_us"),
    Index("batch_by_project", "project", "id"),
    Index("batch_by_state", "state", "id"),
)

batch_line = Table(
    "batch_line",
    metadata,
    _text("project"),
    _text("batch_id", key=True),
    _int("number", key=True),  # of the request, counted from 0
    _int("good"),  # 1: it belongs into the output, 0: among the errors
    _text("key"),  # blob with its answer
    _int("start"),  # where that lies in it
    _int("stop"),
)

evaluation = Table(
    "evaluation",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("name"),
    _text("spec"),  # JSON of an EvaluationSpec with nothing left open
    _text("manifest", null=True),  # of the version of a data set; None: the rows are its own
    _text("rows_key"),  # blob of its rows
    _text("split"),  # of that blob
    _int("rows"),
    _text("graders"),  # JSON list of the hashes of its graders
    _text("state"),
    _text("reason", null=True),
    _text("result", null=True),  # JSON of an EvaluationResult
    _text("counts", null=True),  # JSON of a Counted, of one that has ended; None: what there is is counted
    _int("created_us"),
    _int("updated_us"),
    _int("started_us", null=True),
    _int("finished_us", null=True),
    UniqueConstraint("project", "name", name="evaluation_name"),
    Index("evaluation_by_project", "project", "created_us"),
    Index("evaluation_by_state", "state", "created_us"),
    Index("evaluation_by_rows", "project", "manifest"),
    Index("evaluation_uncounted", "state", sqlite_where=text("counts IS NULL"), postgresql_where=text("counts IS NULL")),
)

evaluation_model = Table(
    "evaluation_model",
    metadata,
    _text("project"),
    _text("evaluation_id", key=True),
    _int("place", key=True),
    _text("source"),  # own | endpoint | given: who answers
    _text("base_hash", null=True),  # of own ones
    _text("version", null=True),
    _text("key"),  # of weights that are held until the evaluation has ended; empty: none
    Index("evaluation_model_by_key", "key"),
)

evaluation_answer = Table(
    "evaluation_answer",
    metadata,
    _text("project"),
    _text("evaluation_id", key=True),
    _int("number", key=True),  # (row * models + model) * samples + sample
    _text("answer"),  # JSON of an Answered
    _int("given"),  # whether there is one: 0 or 1
    _int("latency_us"),
    _int("prompt_tokens"),
    _int("completion_tokens"),
    _int("created_us"),
)

evaluation_score = Table(
    "evaluation_score",
    metadata,
    _text("project"),
    _text("evaluation_id", key=True),
    _int("number", key=True),  # of the answer
    _int("grader", key=True),  # its place among the graders
    Column("score", Float, nullable=True),  # None: there is none
    _int("passed", null=True),  # 0 or 1; None: the grader does not say
    _text("failure", null=True),  # the kind of failure where there is no score
    _text("result"),  # JSON of a GradeResult
    _int("created_us"),
)

openai_eval = Table(
    "openai_eval",
    metadata,
    _text("id", key=True),
    _text("project"),
    _text("given"),  # JSON of a NewEval
    _text("graders"),  # JSON list of ChosenGrader: what its criteria are
    _int("created_us"),
    _int("updated_us"),
    Index("openai_eval_by_creation", "project", "created_us"),
    Index("openai_eval_by_update", "project", "updated_us"),
)

openai_eval_run = Table(
    "openai_eval_run",
    metadata,
    _text("evaluation_id", key=True),
    _text("project"),
    _text("eval_id"),
    _text("asked"),  # JSON of a NewRun without its rows
    _int("gives_rows"),  # whether they were given with it, and are shown with it: 0 or 1
    Index("openai_eval_run_by_eval", "eval_id", "evaluation_id"),
)

event = Table(
    "event",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    _text("project"),
    _text("kind"),
    _text("subject"),  # id of what it is about
    _text("data"),  # JSON object
    _int("created_us"),
    # Without it SQLite would hand out the number of a deleted last row again, and a reader's cursor would skip an event.
    sqlite_autoincrement=True,
)


WEIGHT_HOLDERS = (checkpoint, revision, sampling_session, evaluation_model)
"""Tables whose rows hold weights: `key` is their blob, `version` the hash of their manifest. What none of them names is deleted."""


def changed(connection: Connection, statement: Update) -> bool:
    """Compare-and-swap: whether the update found the row in the state that its WHERE demands."""
    return connection.execute(statement).rowcount == 1
