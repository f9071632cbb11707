"""Evaluations, the answers and scores that they have, and how OpenAI's contract calls them."""

from sqlalchemy import Index, Table, UniqueConstraint, text

from bloomery.store.rows.columns import integer, metadata, real, string

evaluation = Table(
    "evaluation",
    metadata,
    string("id", key=True),
    string("project"),
    string("name"),
    string("spec"),  # JSON of an EvaluationSpec with nothing left open
    string("manifest", null=True),  # of the version of a data set; None: the rows are its own
    string("rows_key"),  # blob of its rows
    string("split"),  # of that blob
    integer("rows"),
    string("graders"),  # JSON list of the hashes of its graders
    string("state"),
    string("reason", null=True),
    string("result", null=True),  # JSON of an EvaluationResult
    string("counts", null=True),  # JSON of a Counted, of one that has ended; None: what there is is counted
    integer("created_us"),
    integer("updated_us"),
    integer("started_us", null=True),
    integer("finished_us", null=True),
    UniqueConstraint("project", "name", name="evaluation_name"),
    Index("evaluation_by_project", "project", "created_us"),
    Index("evaluation_by_state", "state", "created_us"),
    Index("evaluation_by_rows", "project", "manifest"),
    Index("evaluation_uncounted", "state", sqlite_where=text("counts IS NULL"), postgresql_where=text("counts IS NULL")),
)

evaluation_model = Table(
    "evaluation_model",
    metadata,
    string("project"),
    string("evaluation_id", key=True),
    integer("place", key=True),
    string("source"),  # own | endpoint | given: who answers
    string("base_hash", null=True),  # of own ones
    string("version", null=True),
    string("key"),  # of weights that are held until the evaluation has ended; empty: none
    Index("evaluation_model_by_key", "key"),
)

evaluation_answer = Table(
    "evaluation_answer",
    metadata,
    string("project"),
    string("evaluation_id", key=True),
    integer("number", key=True),  # (row * models + model) * samples + sample
    string("answer"),  # JSON of an Answered
    integer("given"),  # whether there is one: 0 or 1
    integer("latency_us"),
    integer("prompt_tokens"),
    integer("completion_tokens"),
    integer("created_us"),
)

evaluation_score = Table(
    "evaluation_score",
    metadata,
    string("project"),
    string("evaluation_id", key=True),
    integer("number", key=True),  # of the answer
    integer("grader", key=True),  # its place among the graders
    real("score", null=True),  # None: there is none
    integer("passed", null=True),  # 0 or 1; None: the grader does not say
    string("failure", null=True),  # the kind of failure where there is no score
    string("result"),  # JSON of a GradeResult
    integer("created_us"),
)

openai_eval = Table(
    "openai_eval",
    metadata,
    string("id", key=True),
    string("project"),
    string("given"),  # JSON of a NewEval
    string("graders"),  # JSON list of ChosenGrader: what its criteria are
    integer("created_us"),
    integer("updated_us"),
    Index("openai_eval_by_creation", "project", "created_us"),
    Index("openai_eval_by_update", "project", "updated_us"),
)

openai_eval_run = Table(
    "openai_eval_run",
    metadata,
    string("evaluation_id", key=True),
    string("project"),
    string("eval_id"),
    string("asked"),  # JSON of a NewRun without its rows
    integer("gives_rows"),  # whether they were given with it, and are shown with it: 0 or 1
    Index("openai_eval_run_by_eval", "eval_id", "evaluation_id"),
)
