"""Every table, in the SQL that SQLite and Postgres share.

Ids are TEXT, times are integer microseconds UTC (`*_us`, set by the caller: the database has no clock here), JSON is TEXT, and states change by
compare-and-swap (`changed`). Every row belongs to a project. Payloads never live here: rows hold blob keys.

Tables stand in modules named as the packages of `services`, but for `events`, to which several add; `columns` has what tables are made of.
Here all of them are put together: the schema is whole only when every one is loaded.
"""

from sqlalchemy import Connection, Update

from bloomery.store.rows.access import DEFAULT_PROJECT, alias, answered, api_key, project
from bloomery.store.rows.batches import batch, batch_line
from bloomery.store.rows.clients import custom_loss, sampling_session, session
from bloomery.store.rows.columns import metadata
from bloomery.store.rows.data import dataset, dataset_item, dataset_version, feedback, file, span, span_sum, upload, upload_part
from bloomery.store.rows.evaluations import evaluation, evaluation_answer, evaluation_model, evaluation_score, openai_eval, openai_eval_run
from bloomery.store.rows.events import event
from bloomery.store.rows.grading import calibration, grader, grader_attack
from bloomery.store.rows.jobs import fine_tuning, job, job_event, job_point
from bloomery.store.rows.training import checkpoint, rollout_step, run, run_metric
from bloomery.store.rows.weights import base_model, deployment, revision

__all__ = [
    "DEFAULT_PROJECT",
    "WEIGHT_HOLDERS",
    "alias",
    "answered",
    "api_key",
    "base_model",
    "batch",
    "batch_line",
    "calibration",
    "changed",
    "checkpoint",
    "custom_loss",
    "dataset",
    "dataset_item",
    "dataset_version",
    "deployment",
    "evaluation",
    "evaluation_answer",
    "evaluation_model",
    "evaluation_score",
    "event",
    "feedback",
    "file",
    "fine_tuning",
    "grader",
    "grader_attack",
    "job",
    "job_event",
    "job_point",
    "metadata",
    "openai_eval",
    "openai_eval_run",
    "project",
    "revision",
    "rollout_step",
    "run",
    "run_metric",
    "sampling_session",
    "session",
    "span",
    "span_sum",
    "upload",
    "upload_part",
]

WEIGHT_HOLDERS = (checkpoint, revision, sampling_session, evaluation_model)
"""Tables whose rows hold weights: `key` is their blob, `version` the hash of their manifest. What none of them names is deleted."""


def changed(connection: Connection, statement: Update) -> bool:
    """Compare-and-swap: whether the update found the row in the state that its WHERE demands."""
    return connection.execute(statement).rowcount == 1
