"""Every verb of every service asks for a scope before it does anything, and shows nothing of one project to another.

The verbs are found by looking at the services themselves, so one that is added must be added here too: to `SCOPES_OF`, and to one of the tables
that say what a stranger gets.
"""

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, cast, get_type_hints

import numpy as np
import pytest
from sqlalchemy import update

from bloomery import services as package
from bloomery.config import ApiConfig
from bloomery.config.data_dir import DataDir
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.clients.session_search import SessionFilter
from bloomery.services.clients.sessions import Session
from bloomery.services.core import Services
from bloomery.services.data.span_filter import SpanFilter
from bloomery.services.evaluations.paired import PairsWanted
from bloomery.services.kinds import EXTERNAL, NAMED
from bloomery.services.weights.versions import Version
from bloomery.store import rows
from bloomery.types.arrays import Array
from bloomery.types.batches import NewBatch
from bloomery.types.datasets import Curate, ImportRows, SplitChoice, UploadRows
from bloomery.types.errors import Forbidden, NotFound
from bloomery.types.evals import Given, NewEval, NewRun
from bloomery.types.evaluations import ChosenGrader, EvaluatedModel, EvaluationData, EvaluationSpec
from bloomery.types.files import NewFile, NewUpload
from bloomery.types.fine_tuning import FineTune
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.graders import AttackGrader, AttackRow, CalibrateGrader, CreateGrader, LabelledRow, OutputRow, RunGrader, WaiveGrader
from bloomery.types.jobs import Begin, CreateChain, Data, JobSpec
from bloomery.types.operations import CheckpointResult, SnapshotResult
from bloomery.types.resources import GiveFeedback
from bloomery.types.rollouts import RecordedStep, RolloutFilter
from bloomery.types.wire import encode
from tests.engine.test_chains import PASSING, Loop
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import LORA, ME, STRANGER, operation, play
from tests.services.stage import add_snapshot, chat
from tests.store.template import migrated
from tests.train.builders import run, train

LOOK = "read train"
SCOPES_OF = {
    "Audit.entries": "admin",
    "Audit.storage": "read admin",
    "Auth.create": "admin",
    "Auth.list": "admin",
    "Auth.revoke": "admin",
    "Batches.cancel": "infer",
    "Batches.create": "infer",
    "Batches.get": "infer read",
    "Batches.list": "infer read",
    "Calibrations.calibrate": "train",
    "Calibrations.gate_card": "read train deploy",
    "Calibrations.list": LOOK,
    "Calibrations.may_gate": "read train deploy",
    "Cards.get": "read train deploy",
    "Cards.measure": "train deploy",
    "Checkpoints.delete": "train",
    "Checkpoints.find": LOOK,
    "Checkpoints.latest": LOOK,
    "Checkpoints.list": LOOK,
    "Checkpoints.name_at": LOOK,
    "Checkpoints.named": LOOK,
    "Checkpoints.own": "train",
    "Checkpoints.set_ttl": "train",
    "Curation.judged": "train",
    "CustomLosses.attach": "train",
    "CustomLosses.create": "train",
    "CustomLosses.get": "train",
    "Datasets.chosen": LOOK,
    "Datasets.version": LOOK,
    "Datasets.create": "train",
    "Datasets.curate": "train",
    "Datasets.get": LOOK,
    "Datasets.import_rows": "train",
    "Datasets.list": LOOK,
    "Datasets.delete": "train",
    "Datasets.of_files": "train",
    "Datasets.rejected": LOOK,
    "Datasets.rows": LOOK,
    "Datasets.split": "train",
    "Datasets.stored": LOOK,
    "Datasets.upload": "train",
    "Datasets.validate": "train",
    "Deployments.create": "deploy",
    "Deployments.get": "read deploy",
    "Deployments.list": "read deploy",
    "Deployments.live_version": "read train deploy",
    "Deployments.names": "infer read deploy",
    "Deployments.promote": "deploy",
    "Deployments.rollback": "deploy",
    "Deployments.set_price": "deploy",
    "Deployments.swaps": "read deploy",
    "Deployments.target": "infer",
    "Chains.create": "train",
    "Chains.resolve": "train",
    "Estimates.of": "train",
    "Evals.cancel_run": "train",
    "Evals.change": "train",
    "Evals.create": "train",
    "Evals.delete": "train",
    "Evals.delete_run": "train",
    "Evals.get": LOOK,
    "Evals.get_run": LOOK,
    "Evals.item": LOOK,
    "Evals.items": LOOK,
    "Evals.list": LOOK,
    "Evals.list_runs": LOOK,
    "Evals.run": "train",
    "Evaluations.asked": "train",
    "Evaluations.cancel": "train",
    "Evaluations.create": "train",
    "Evaluations.delete": "train",
    "Evaluations.get": LOOK,
    "Evaluations.items": LOOK,
    "Evaluations.leaderboard": LOOK,
    "Evaluations.list": LOOK,
    "Evaluations.priced": "train",
    "Pairs.compare": LOOK,
    "Exports.file": LOOK,
    "Exports.lay_out": LOOK,
    "External.offer": LOOK,
    "Files.content": "read train infer",
    "Files.create": "train infer",
    "Files.delete": "train infer",
    "Files.get": "read train infer",
    "Files.list": "read train infer",
    "FineTuning.cancel": "train",
    "FineTuning.checkpoints": LOOK,
    "FineTuning.create": "train",
    "FineTuning.events": LOOK,
    "FineTuning.get": LOOK,
    "FineTuning.list": LOOK,
    "FineTuning.pause": "train",
    "FineTuning.resume": "train",
    "Followed.changed": "admin",
    "Followed.points": "admin",
    "Garbage.collect": "admin",
    "Jobs.cancel": "train",
    "Jobs.create": "train",
    "Jobs.events": LOOK,
    "Jobs.get": LOOK,
    "Jobs.list": LOOK,
    "Jobs.pause": "train",
    "Jobs.points": LOOK,
    "Jobs.resolve": "train",
    "Jobs.resume": "train",
    "RemoteAgents.check": "train",
    "RemoteAgents.list": LOOK,
    "Endpoints.list": LOOK,
    "Endpoints.named": "train",
    "ModelCards.of_job": LOOK,
    "ModelCards.of_version": LOOK,
    "Attacks.attack": "train",
    "Attacks.known": LOOK,
    "Attacks.list": LOOK,
    "Graders.attack": "train",
    "Graders.waive": "train",
    "Graders.attempt": "train infer",
    "Graders.check": LOOK,
    "Graders.create": "train",
    "Graders.get": LOOK,
    "Graders.list": LOOK,
    "Graders.require_models": "train infer",
    "Graders.run": "train infer",
    "Graders.versions": LOOK,
    "Judgements.give": "infer",
    "Judgements.list": "read",
    "Leases.claim": "admin",
    "Leases.ended": "admin",
    "Leases.release": "admin",
    "Rollouts.add": "train",
    "Rollouts.export": LOOK,
    "Rollouts.groups": LOOK,
    "Rollouts.steps": LOOK,
    "RowTokens.preview": LOOK,
    "RowTokens.statistics": LOOK,
    "Live.listening": LOOK,
    "RunMetricsReader.series": LOOK,
    "Models.list": "infer read train deploy",
    "Publishing.copy": "train",
    "Publishing.publish": "train",
    "Publishing.unpublish": "train",
    "Runs.checkpoint": "train",
    "Runs.create": "train",
    "Runs.get": LOOK,
    "Runs.list": LOOK,
    "Runs.load": "train",
    "Runs.note_arriving": "train",
    "Runs.result": LOOK,
    "Runs.snapshot": "train",
    "Runs.submit": "train",
    "Runs.unload": "train",
    "Runs.waiting_for": LOOK,
    "Sampling.resolve": "infer",
    "Sampling.served": "infer",
    "Sampling.stream": "infer",
    "SessionSearch.find": LOOK,
    "Sessions.create": "train infer",
    "Sessions.create_sampling": "train infer",
    "Sessions.finish": "train infer",
    "Sessions.follow": "train infer",
    "Sessions.get": LOOK,
    "Sessions.get_sampling": "infer read",
    "Sessions.heartbeat": "train infer",
    "Sessions.join_sampling": "infer",
    "Sessions.list": LOOK,
    "Sessions.require_open": "train infer",
    "Sessions.run_names": LOOK,
    "Sessions.samplers": LOOK,
    "Traffic.body": "read",
    "Traffic.get": "read",
    "Traffic.list": "read",
    "Traffic.totals": "read",
    "Uploads.add": "train",
    "Uploads.cancel": "train",
    "Uploads.complete": "train",
    "Uploads.create": "train",
    "Versions.find": "infer read train deploy",
}
"""Any one of the scopes is enough."""
OF_THE_KEY_ITSELF = {
    "Auth.mine",
    "Auth.give_up",
    "Leases.finish",
    "Leases.report",
    "RateLimits.give_back",
    "RateLimits.headers",
    "RateLimits.prompt",
    "RateLimits.request",
    "RateLimits.rollout",
    "RateLimits.sampled",
}
"""Any key may look at itself, give itself up, use up what it may, and report of the job that it is lent for."""
NOT_ASKED_BY_CALLERS = {
    # What a process does for itself, or what says who calls in the first place.
    "Cards": {"next", "on"},
    "Auth": {"load", "check", "check_fingerprint", "note_use", "lend", "take_back", "principal"},
    "BatchRunner": {"running"},
    "Datasets": {"blob"},
    "Deployments": {"load", "expect"},
    "Identity": {"check", "exchange", "log_in", "logged_in", "renew"},
    "Fleet": {"beside", "group", "want"},
    "Garbage": {"claim", "expire", "tidy"},
    "CustomLosses": {"require_offered"},
    "Leases": {"load", "expire"},
    "Live": {"close", "tell", "told_by"},
    "Meters": {"check_samples", "exposition", "most_waiting", "refused", "request"},
    "Models": {"load", "all", "named", "resolve", "size", "tokenizer", "check_room"},
    "Rendering": {"prompt", "encode"},
    "Sampling": {"serves"},
    "Sessions": {"forget", "note_asked", "store_asked"},
    "Traffic": {"record", "flush", "state"},
    # Behind a verb that has asked already, or a signature of this server.
    "Checkpoints": {"announce", "signed"},
    "Exports": {"of"},
    "Spelling": {"of"},
    "Files": {"put"},
    "External": {"open"},
    "Versions": {"look", "stays", "unknown"},
}


class World(NamedTuple):
    """Names of things of one project, or of nobody's."""

    run: str
    tinker_run: str
    session: str
    sampler: str
    saved: str
    published: str
    exported: str
    version: str
    deployment: str
    dataset: str
    dataset_version: str
    manifest: str
    grader: str
    span: str
    episode: str
    eval: str
    eval_run: str
    evaluation: str
    evaluation_name: str
    job: str
    job_name: str
    file: str
    tuned: str
    upload: str
    asked: str
    batch: str

    @property
    def path(self) -> str:
        """Of the checkpoint."""
        return f"tinker://{self.tinker_run}/weights/{self.saved}"

    @property
    def sampler_path(self) -> str:
        """Of the snapshot."""
        return f"tinker://{self.tinker_run}/sampler_weights/{self.published}"


Attempt = Callable[[Services, World], Awaitable[Any]]
REQUEST = Generate(
    request_id="", weights=Weights(version=BASE), prompt=Array.of(np.asarray([1], np.int32)), params=SamplingParams(max_tokens=1, seed=1)
)
ROWS = ImportRows(format="jsonl", splits={"train": '{"text": "a", "label": "b"}'})
CHECK = {"type": "string_check", "name": "c", "input": "{{ item.a }}", "reference": "grader-text-of-default", "operation": "eq"}
OUTPUTS = RunGrader(rows=[OutputRow(output="x")])
ATTACK = AttackGrader(rows=[AttackRow(item={"a": "x"})] * 4)
LABELLED = CalibrateGrader(rows=[LabelledRow(output="x", label=True)] * 2)
UPLOAD = UploadRows(format="jsonl")


def evaluation(*, name: str = "x", data: str = "own-rows", version: str | None = None, model: str = "tiny", grader: str = "own") -> EvaluationSpec:
    """One of training rows."""
    rows = EvaluationData(dataset=data, version=version, split="train")
    return EvaluationSpec(name=name, data=rows, models=[EvaluatedModel(model=model)], graders=[ChosenGrader(grader=grader)])


EVAL = NewEval(name="eval-of-default", item_schema={}, criteria=[CHECK])
RUN = NewRun(kind="jsonl", shown={"source": {}}, rows=[Given(item={"a": "item-of-default"})])
ROLLOUTS = encode(RecordedStep(groups=()))
VERSION = Version(Weights(version=BASE), BASE, "tiny")

ARE_NOT_FOUND: dict[str, list[Attempt]] = {
    "Batches.cancel": [lambda s, w: s.batches.cancel(STRANGER, w.batch)],
    "Batches.create": [lambda s, w: s.batches.create(STRANGER, NewBatch(endpoint="/v1/embeddings", input_file=w.asked))],
    "Batches.get": [lambda s, w: s.batches.get(STRANGER, w.batch)],
    "Cards.get": [lambda s, w: s.cards.get(STRANGER, w.version), lambda s, w: s.cards.get(STRANGER, w.deployment)],
    "Cards.measure": [lambda s, w: s.cards.measure(STRANGER, w.version), lambda s, w: s.cards.measure(STRANGER, w.sampler_path)],
    "Checkpoints.delete": [lambda s, w: s.checkpoints.delete(STRANGER, w.path)],
    "Checkpoints.find": [lambda s, w: s.checkpoints.find(STRANGER, w.path), lambda s, w: s.checkpoints.find(STRANGER, w.sampler_path)],
    "Checkpoints.named": [
        lambda s, w: s.checkpoints.named(STRANGER, w.run, NAMED, w.saved),
        lambda s, w: s.checkpoints.named(STRANGER, w.tinker_run, NAMED, w.saved),
    ],
    "Checkpoints.own": [lambda s, w: s.checkpoints.own(STRANGER, w.path)],
    "Checkpoints.set_ttl": [lambda s, w: s.checkpoints.set_ttl(STRANGER, w.path, 1)],
    "Curation.judged": [lambda s, w: s.datasets._curation.judged(STRANGER, Curate(parent="x", deployment=w.deployment))],
    "Datasets.version": [
        lambda s, w: s.datasets.version(STRANGER, w.dataset, None, field="dataset", version_field="version"),
        lambda s, w: s.datasets.version(STRANGER, "own-rows", w.dataset_version, field="dataset", version_field="version"),
    ],
    "Datasets.chosen": [
        lambda s, w: s.datasets.chosen(STRANGER, w.dataset, None, "train"),
        lambda s, w: s.datasets.chosen(STRANGER, "own-rows", w.dataset_version, "train"),
    ],
    "Datasets.curate": [
        lambda s, w: s.datasets.curate(STRANGER, w.dataset, Curate(parent=w.dataset_version)),
        lambda s, w: s.datasets.curate(STRANGER, "own", Curate(parent=w.dataset_version)),
    ],
    "Datasets.delete": [lambda s, w: s.datasets.delete(STRANGER, w.dataset)],
    "Datasets.get": [lambda s, w: s.datasets.get(STRANGER, w.dataset)],
    "Datasets.import_rows": [
        lambda s, w: s.datasets.import_rows(STRANGER, w.dataset, ROWS),
        lambda s, w: s.datasets.import_rows(STRANGER, "own", ROWS.model_copy(update={"parent": w.dataset_version})),
        lambda s, w: s.datasets.import_rows(STRANGER, "own", ROWS.model_copy(update={"parent": w.manifest})),
    ],
    "Datasets.rejected": [lambda s, w: s.datasets.rejected(STRANGER, w.dataset, w.dataset_version)],
    "Datasets.split": [
        lambda s, w: s.datasets.split(STRANGER, w.dataset, w.dataset_version, SplitChoice(eval=0.5)),
        lambda s, w: s.datasets.split(STRANGER, "own", w.dataset_version, SplitChoice(eval=0.5)),
    ],
    "Datasets.stored": [lambda s, w: s.datasets.stored(STRANGER, w.dataset, w.dataset_version)],
    "Datasets.upload": [
        lambda s, w: s.datasets.upload(STRANGER, w.dataset, UPLOAD, BytesIO(b"{}")),
        lambda s, w: s.datasets.upload(STRANGER, "own", UPLOAD.model_copy(update={"parent": w.dataset_version}), BytesIO(b"{}")),
    ],
    "Datasets.validate": [
        lambda s, w: s.datasets.validate(STRANGER, UPLOAD, BytesIO(b"{}"), w.dataset),
        lambda s, w: s.datasets.validate(STRANGER, UPLOAD.model_copy(update={"parent": w.manifest}), BytesIO(b"{}"), "own"),
    ],
    "Datasets.rows": [
        lambda s, w: s.datasets.rows(STRANGER, w.dataset, w.dataset_version, "train"),
        lambda s, w: s.datasets.rows(STRANGER, "own", w.dataset_version, "train"),
        lambda s, w: s.datasets.rows(STRANGER, "own", w.manifest, "train"),
    ],
    "Deployments.create": [
        lambda s, w: s.deployments.create(STRANGER, "mine", w.version, {}),
        lambda s, w: s.deployments.create(STRANGER, "mine", w.sampler_path, {}),
    ],
    "Deployments.get": [lambda s, w: s.deployments.get(STRANGER, w.deployment)],
    "Deployments.promote": [
        lambda s, w: s.deployments.promote(STRANGER, w.deployment, "tiny", {}),
        lambda s, w: s.deployments.promote(STRANGER, "own", w.version, {}),
    ],
    "Deployments.rollback": [lambda s, w: s.deployments.rollback(STRANGER, w.deployment, 1)],
    "Deployments.swaps": [lambda s, w: s.deployments.swaps(STRANGER, w.deployment)],
    "Deployments.set_price": [lambda s, w: s.deployments.set_price(STRANGER, w.deployment, None)],
    "Chains.create": [lambda s, w: s.chains.create(STRANGER, chain(w))],
    "Chains.resolve": [lambda s, w: s.chains.resolve(STRANGER, chain(w))],
    "Estimates.of": [lambda s, w: s.estimates.of(STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset=w.dataset)))],
    "Exports.file": [lambda s, w: s.exports.file(STRANGER, w.version, None, "adapter_config.json")],
    "Exports.lay_out": [lambda s, w: s.exports.lay_out(STRANGER, w.version, None), lambda s, w: s.exports.lay_out(STRANGER, w.sampler_path, None)],
    "External.offer": [lambda s, w: s.external.offer(STRANGER, w.run, w.exported), lambda s, w: s.external.offer(STRANGER, w.tinker_run, w.exported)],
    "Files.content": [lambda s, w: s.files.content(STRANGER, w.file)],
    "Files.delete": [lambda s, w: s.files.delete(STRANGER, w.file)],
    "Files.get": [lambda s, w: s.files.get(STRANGER, w.file)],
    "FineTuning.cancel": [lambda s, w: s.fine_tuning.cancel(STRANGER, w.tuned)],
    "FineTuning.checkpoints": [lambda s, w: s.fine_tuning.checkpoints(STRANGER, w.tuned)],
    "FineTuning.create": [
        lambda s, w: s.fine_tuning.create(STRANGER, FineTune(model="tiny", training_file=w.file)),
        lambda s, w: s.fine_tuning.create(STRANGER, FineTune(model=w.version, training_file="x")),
    ],
    "FineTuning.events": [lambda s, w: s.fine_tuning.events(STRANGER, w.tuned)],
    "FineTuning.get": [lambda s, w: s.fine_tuning.get(STRANGER, w.tuned)],
    "FineTuning.pause": [lambda s, w: s.fine_tuning.pause(STRANGER, w.tuned)],
    "FineTuning.resume": [lambda s, w: s.fine_tuning.resume(STRANGER, w.tuned)],
    "Jobs.cancel": [lambda s, w: s.jobs.cancel(STRANGER, w.job), lambda s, w: s.jobs.cancel(STRANGER, w.job_name)],
    "Jobs.create": [
        lambda s, w: s.jobs.create(STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset=w.dataset))),
        lambda s, w: s.jobs.create(STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset="own-rows", version=w.dataset_version))),
        lambda s, w: s.jobs.create(STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset="own-rows"), begin=Begin(job=w.job))),
        lambda s, w: s.jobs.create(
            STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset="own-rows"), begin=Begin(run=w.run, checkpoint=w.saved))
        ),
    ],
    "Jobs.events": [lambda s, w: s.jobs.events(STRANGER, w.job)],
    "Jobs.get": [lambda s, w: s.jobs.get(STRANGER, w.job), lambda s, w: s.jobs.get(STRANGER, w.job_name)],
    "Jobs.pause": [lambda s, w: s.jobs.pause(STRANGER, w.job)],
    "Jobs.points": [lambda s, w: s.jobs.points(STRANGER, w.job)],
    "Jobs.resolve": [lambda s, w: s.jobs.resolve(STRANGER, JobSpec(name="x", base_model="tiny", data=Data(dataset=w.dataset)))],
    "Jobs.resume": [lambda s, w: s.jobs.resume(STRANGER, w.job)],
    "ModelCards.of_job": [lambda s, w: s.model_cards.of_job(STRANGER, w.job)],
    "ModelCards.of_version": [
        lambda s, w: s.model_cards.of_version(STRANGER, w.version),
        lambda s, w: s.model_cards.of_version(STRANGER, w.deployment),
    ],
    "Evals.cancel_run": [lambda s, w: s.evals.cancel_run(STRANGER, w.eval, w.eval_run)],
    "Evals.change": [lambda s, w: s.evals.change(STRANGER, w.eval, name="x", metadata=None)],
    "Evals.delete": [lambda s, w: s.evals.delete(STRANGER, w.eval)],
    "Evals.delete_run": [lambda s, w: s.evals.delete_run(STRANGER, w.eval, w.eval_run)],
    "Evals.get": [lambda s, w: s.evals.get(STRANGER, w.eval)],
    "Evals.get_run": [lambda s, w: s.evals.get_run(STRANGER, w.eval, w.eval_run)],
    "Evals.item": [lambda s, w: s.evals.item(STRANGER, w.eval, w.eval_run, 0)],
    "Evals.items": [lambda s, w: s.evals.items(STRANGER, w.eval, w.eval_run)],
    "Evals.list_runs": [lambda s, w: s.evals.list_runs(STRANGER, w.eval)],
    "Evals.run": [lambda s, w: s.evals.run(STRANGER, w.eval, RUN)],
    "Evaluations.asked": [
        lambda s, w: s.evaluations.asked(STRANGER, w.deployment, field="model"),
        lambda s, w: s.evaluations.asked(STRANGER, w.version, field="model"),
    ],
    "Evaluations.cancel": [lambda s, w: s.evaluations.cancel(STRANGER, w.evaluation)],
    "Evaluations.create": [
        lambda s, w: s.evaluations.create(STRANGER, evaluation(data=w.dataset)),
        lambda s, w: s.evaluations.create(STRANGER, evaluation(version=w.dataset_version)),
        lambda s, w: s.evaluations.create(STRANGER, evaluation(version=w.manifest)),
        lambda s, w: s.evaluations.create(STRANGER, evaluation(model=w.deployment)),
        lambda s, w: s.evaluations.create(STRANGER, evaluation(model=w.version)),
        lambda s, w: s.evaluations.create(STRANGER, evaluation(grader=w.grader)),
    ],
    "Evaluations.delete": [lambda s, w: s.evaluations.delete(STRANGER, w.evaluation), lambda s, w: s.evaluations.delete(STRANGER, w.evaluation_name)],
    "Evaluations.get": [lambda s, w: s.evaluations.get(STRANGER, w.evaluation), lambda s, w: s.evaluations.get(STRANGER, w.evaluation_name)],
    "Evaluations.items": [lambda s, w: s.evaluations.items(STRANGER, w.evaluation)],
    "Pairs.compare": [
        lambda s, w: s.pairs.compare(STRANGER, w.evaluation, PairsWanted()),
        lambda s, w: s.pairs.compare(STRANGER, w.evaluation_name, PairsWanted()),
        lambda s, w: s.pairs.compare(STRANGER, "own-evaluation", PairsWanted(against=w.evaluation)),
        lambda s, w: s.pairs.compare(STRANGER, "own-evaluation", PairsWanted(against=w.evaluation_name)),
    ],
    "Evaluations.leaderboard": [
        lambda s, w: s.evaluations.leaderboard(STRANGER, w.dataset, "own"),
        lambda s, w: s.evaluations.leaderboard(STRANGER, "own-rows", w.grader, split="train"),
        lambda s, w: s.evaluations.leaderboard(STRANGER, "own-rows", "own", version=w.dataset_version),
    ],
    "Calibrations.calibrate": [lambda s, w: s.calibrations.calibrate(STRANGER, w.grader, LABELLED)],
    "Calibrations.list": [lambda s, w: s.calibrations.list(STRANGER, w.grader)],
    "Attacks.attack": [
        lambda s, w: s.attacks.attack(STRANGER, w.grader, ATTACK),
        lambda s, w: s.attacks.attack(STRANGER, "own", AttackGrader(dataset=w.dataset)),
    ],
    "Attacks.list": [lambda s, w: s.attacks.list(STRANGER, w.grader)],
    "Graders.waive": [lambda s, w: s.graders.waive(STRANGER, w.grader, WaiveGrader(reason="r"))],
    "Graders.get": [lambda s, w: s.graders.get(STRANGER, w.grader), lambda s, w: s.graders.get(STRANGER, w.grader, 1)],
    "Graders.run": [lambda s, w: s.graders.run(STRANGER, w.grader, OUTPUTS)],
    "Graders.versions": [lambda s, w: s.graders.versions(STRANGER, w.grader)],
    "Judgements.give": [
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target=w.span, metric="m", value=True)),
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target=w.episode, metric="m", value=True)),
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target="own-span", metric="m", value=w.span, type="preference")),
    ],
    "Publishing.publish": [lambda s, w: s.publishing.publish(STRANGER, w.path)],
    "Publishing.unpublish": [lambda s, w: s.publishing.unpublish(STRANGER, w.path)],
    "Rollouts.add": [lambda s, w: s.rollouts.add(STRANGER, w.run, 1, ROLLOUTS), lambda s, w: s.rollouts.add(STRANGER, w.tinker_run, 1, ROLLOUTS)],
    "Rollouts.export": [lambda s, w: s.rollouts.export(STRANGER, w.run, RolloutFilter())],
    "Rollouts.groups": [lambda s, w: s.rollouts.groups(STRANGER, w.run, 1, RolloutFilter(), limit=1)],
    "Rollouts.steps": [lambda s, w: s.rollouts.steps(STRANGER, w.run), lambda s, w: s.rollouts.steps(STRANGER, w.tinker_run)],
    "Runs.checkpoint": [lambda s, w: s.runs.checkpoint(STRANGER, w.run, 9, "x"), lambda s, w: s.runs.checkpoint(STRANGER, w.tinker_run, 9, "x")],
    "Runs.get": [lambda s, w: s.runs.get(STRANGER, w.run), lambda s, w: s.runs.get(STRANGER, w.tinker_run)],
    "Runs.load": [lambda s, w: load_into_own(s, w)],
    "Runs.note_arriving": [lambda s, w: s.runs.note_arriving(STRANGER, w.run), lambda s, w: s.runs.note_arriving(STRANGER, w.tinker_run)],
    "Runs.result": [lambda s, w: s.runs.result(STRANGER, w.run, 1, 0), lambda s, w: s.runs.result(STRANGER, w.tinker_run, 1, 0)],
    "Runs.snapshot": [lambda s, w: s.runs.snapshot(STRANGER, w.run, 9), lambda s, w: s.runs.snapshot(STRANGER, w.tinker_run, 9)],
    "Runs.submit": [
        lambda s, w: s.runs.submit(STRANGER, w.run, 9, operation(9)),
        lambda s, w: s.runs.submit(STRANGER, w.tinker_run, 9, operation(9)),
    ],
    "Runs.unload": [lambda s, w: s.runs.unload(STRANGER, w.run)],
    "Runs.waiting_for": [lambda s, w: s.runs.waiting_for(STRANGER, w.run), lambda s, w: s.runs.waiting_for(STRANGER, w.tinker_run)],
    "Sampling.resolve": [
        lambda s, w: s.sampling.resolve(STRANGER, w.deployment),
        lambda s, w: s.sampling.resolve(STRANGER, w.version),
        lambda s, w: s.sampling.resolve(STRANGER, w.sampler_path),
    ],
    "Sessions.create_sampling": [lambda s, w: s.sessions.create_sampling(STRANGER, w.session, 1, VERSION, None)],
    "Sessions.finish": [lambda s, w: s.sessions.finish(STRANGER, w.session, "stolen")],
    "Sessions.follow": [lambda s, w: s.sessions.follow(STRANGER, w.session, 1, VERSION, run_id=w.run, saved=4)],
    "Sessions.get": [lambda s, w: s.sessions.get(STRANGER, w.session)],
    "Sessions.get_sampling": [lambda s, w: s.sessions.get_sampling(STRANGER, w.sampler)],
    "Sessions.heartbeat": [lambda s, w: s.sessions.heartbeat(STRANGER, w.session)],
    "Sessions.join_sampling": [lambda s, w: s.sessions.join_sampling(STRANGER, w.sampler)],
    "Sessions.require_open": [lambda s, w: s.sessions.require_open(STRANGER, w.session)],
    "RowTokens.preview": [
        lambda s, w: s.row_tokens.preview(STRANGER, w.dataset, w.dataset_version, model="tiny", split="train", limit=1, offset=0, context=None)
    ],
    "RowTokens.statistics": [lambda s, w: s.row_tokens.statistics(STRANGER, w.dataset, w.dataset_version, model="tiny", split="train")],
    "Traffic.body": [lambda s, w: s.traffic.body(STRANGER, w.span)],
    "Traffic.get": [lambda s, w: s.traffic.get(STRANGER, w.span)],
    "Uploads.add": [lambda s, w: s.uploads.add(STRANGER, w.upload, BytesIO(b"x"), bytes(32))],
    "Uploads.cancel": [lambda s, w: s.uploads.cancel(STRANGER, w.upload)],
    "Uploads.complete": [lambda s, w: s.uploads.complete(STRANGER, w.upload, [], None)],
    "Versions.find": [lambda s, w: s.versions.find(STRANGER, w.version), lambda s, w: s.versions.find(STRANGER, w.sampler_path)],
}
"""What names a thing; asked for another project's, the answer is word for word that for a thing that is not there."""
SHOW_ONES_OWN: dict[str, Attempt] = {
    "Audit.entries": lambda s, w: s.audit.entries(STRANGER, since_us=0, until_us=1 << 60, about=None),
    "Audit.storage": lambda s, w: s.audit.storage(STRANGER),
    "Auth.list": lambda s, w: s.auth.list(STRANGER),
    "Batches.list": lambda s, w: s.batches.list(STRANGER),
    "Checkpoints.latest": lambda s, w: s.checkpoints.latest(STRANGER, [w.run]),
    "Checkpoints.list": lambda s, w: s.checkpoints.list(STRANGER, run_id=w.run),
    "Checkpoints.name_at": lambda s, w: s.checkpoints.name_at(STRANGER, w.run, NAMED, 3),
    "Datasets.list": lambda s, w: s.datasets.list(STRANGER),
    "Deployments.list": lambda s, w: s.deployments.list(STRANGER),
    "Deployments.live_version": lambda s, w: s.deployments.live_version(STRANGER, w.deployment),
    "Deployments.names": lambda s, w: s.deployments.names(STRANGER),
    "Deployments.target": lambda s, w: s.deployments.target(STRANGER, w.deployment),
    "Files.list": lambda s, w: s.files.list(STRANGER),
    "FineTuning.list": lambda s, w: s.fine_tuning.list(STRANGER),
    "Jobs.list": lambda s, w: s.jobs.list(STRANGER),
    "Evals.list": lambda s, w: s.evals.list(STRANGER),
    "Evaluations.list": lambda s, w: s.evaluations.list(STRANGER),
    "Graders.list": lambda s, w: s.graders.list(STRANGER),
    "Judgements.list": lambda s, w: s.feedback.list(STRANGER, target=w.span),
    "RunMetricsReader.series": lambda s, w: s.run_metrics.series(STRANGER, w.run),
    "Runs.list": lambda s, w: s.runs.list(STRANGER),
    "Sampling.served": lambda s, w: s.sampling.served(STRANGER),
    "SessionSearch.find": lambda s, w: s.session_search.find(STRANGER, SessionFilter(), behind=None, limit=100),
    "Sessions.list": lambda s, w: s.sessions.list(STRANGER, limit=100, offset=0),
    "Sessions.run_names": lambda s, w: s.sessions.run_names(STRANGER, w.session),
    "Sessions.samplers": lambda s, w: s.sessions.samplers(STRANGER, w.session),
    "Traffic.list": lambda s, w: s.traffic.list(STRANGER, SpanFilter(deployment=w.deployment, episode=w.episode)),
    "Traffic.totals": lambda s, w: s.traffic.totals(STRANGER),
}
"""What lists: nothing of another project's is in it, whatever it is asked for."""
HAVE_TESTS_OF_THEIR_OWN = {
    # tests/services/access/test_auth.py: an admin changes keys of its own project alone.
    "Auth.create",
    "Auth.revoke",
    # tests/services/clients/test_live.py: it says what kinds of things change, and nothing of whose.
    "Live.listening",
    # tests/services/clients/test_custom_losses.py: a loss belongs to a project.
    "CustomLosses.attach",
    "CustomLosses.create",
    "CustomLosses.get",
    # tests/api/test_agents.py: the configuration of an agent says which projects it is for.
    "RemoteAgents.check",
    "RemoteAgents.list",
    # tests/api/test_endpoints.py: the configuration of an endpoint says which projects it is for.
    "Endpoints.list",
    "Endpoints.named",
    # They make things of the caller's own, below.
    "Datasets.create",
    "Datasets.of_files",
    "Files.create",
    "Uploads.create",
    "Graders.create",
    "Evals.create",
    "Runs.create",
    "Sessions.create",
    # It is for the whole server, below.
    "Garbage.collect",
    # The same, in tests/api/test_jobs.py.
    "Followed.changed",
    "Followed.points",
    "Leases.claim",
    "Leases.ended",
    "Leases.release",
    # Base models are everybody's.
    "Models.list",
    # They take what `Checkpoints.find` and `Sampling.resolve` found.
    "Publishing.copy",
    "Sampling.stream",
    # They take all that they grade by, and ask models through `Sampling.resolve`.
    "Graders.attempt",
    "Graders.check",
    # They take a version that `Graders.get` found.
    "Attacks.known",
    "Calibrations.gate_card",
    "Calibrations.may_gate",
    "Graders.attack",
    "Graders.require_models",
    "Evaluations.priced",
}


def test_every_verb_is_in_the_tables() -> None:
    assert set(verbs()) - OF_THE_KEY_ITSELF == set(SCOPES_OF)
    named = [*ARE_NOT_FOUND, *SHOW_ONES_OWN, *HAVE_TESTS_OF_THEIR_OWN]
    assert sorted(named) == sorted(SCOPES_OF)


def test_what_does_not_ask_who_calls_is_not_for_callers() -> None:
    kinds = {kind for kind in get_type_hints(Services).values() if inspect.isclass(kind) and kind.__module__.startswith(package.__name__)}
    silent = {kind.__name__: {name for name, method in methods(kind) if "p" not in inspect.signature(method).parameters} for kind in kinds}
    assert {kind: names for kind, names in silent.items() if names} == NOT_ASKED_BY_CALLERS


@pytest.mark.parametrize("verb", sorted(SCOPES_OF))
def test_a_verb_asks_for_its_scope_before_it_does_anything(verb: str) -> None:
    allowed = set(SCOPES_OF[verb].split())
    refused = {scope for scope in SCOPES if refuses(verb, frozenset({scope}))}
    assert refused == SCOPES - allowed
    assert refuses(verb, SCOPES - allowed)


def test_nothing_of_one_project_is_shown_to_another(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world, nothing = await populate(services), World(*(f"nothing-{field}" for field in World._fields))
            before = await everything(services, world)
            for verb, attempts in ARE_NOT_FOUND.items():
                for number, attempt in enumerate(attempts):
                    theirs, nobodys = await refusal(attempt, services, world), await refusal(attempt, services, nothing)
                    assert theirs == nobodys, f"{verb} {number}"
            for verb, attempt in SHOW_ONES_OWN.items():
                shown = repr(await attempt(services, world))
                assert [name for name, value in world._asdict().items() if value in shown] == [], verb
                assert shown == repr(await attempt(services, nothing)), verb
            assert await everything(services, world) == before
            assert [message.run_id for message in engine.executed] == [world.run] * 5

    play(tmp_path, story)


def test_versions_in_the_chain_of_a_run_are_read_named_and_made_whole_by_its_project_alone(tmp_path: Path) -> None:
    """Though the other project trained the same weights, which lie under the same key."""

    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            loop = Loop(DataDir(tmp_path).blobs)
            mine = loop.publish(steps=0)
            (theirs,) = train(run(loop.base, loop.shelf, rank=0, run_id="run-2"), [PASSING])
            assert isinstance(theirs, SnapshotResult)
            assert mine.key == theirs.key
            await services.deployments.create(STRANGER, "own", "tiny", {})
            for p, published, run_id in ((ME, mine, "run-1"), (STRANGER, theirs, "run-2")):
                await add_snapshot(services._database, published.version, BASE, run_id, project=p.project)
                row = update(rows.checkpoint).where(rows.checkpoint.c.version == published.version)
                await services._database.write(lambda connection, row=row, key=published.key: connection.execute(row.values(key=key, name=None)))
                assert (await services.versions.find(p, published.version)).weights == Weights(version=published.version, key=published.key)

            async def refused(name: str) -> list[str]:
                attempts = (
                    services.versions.find(STRANGER, name),
                    services.exports.lay_out(STRANGER, name, None),
                    services.exports.file(STRANGER, name, None, "model.safetensors"),
                    services.deployments.create(STRANGER, "mine", name, {}),
                    services.deployments.promote(STRANGER, "own", name, {}),
                    services.sampling.resolve(STRANGER, name),
                    services.cards.get(STRANGER, name),
                )
                said = []
                for attempt in attempts:
                    with pytest.raises(NotFound) as told:
                        await attempt
                    said.append(told.value.message.replace(name, "<name>"))
                return said

            assert await refused(mine.version) == await refused("0" * len(mine.version))
            assert not loop.blobs.exists(mine.key), "nothing was made whole for who may not read it"

    play(tmp_path, story)


def test_the_same_names_in_two_projects_are_two_things(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world = await populate(services)
            theirs = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, tinker_id=world.tinker_run)
            assert theirs.id != world.run
            assert (await services.runs.get(STRANGER, world.tinker_run)).id == theirs.id
            await services.runs.submit(STRANGER, world.tinker_run, 1, operation(1))
            assert (await services.runs.get(ME, world.tinker_run)).id == world.run
            await services.runs.submit(ME, world.tinker_run, 6, operation(6))
            assert await services.runs.result(ME, world.tinker_run, 6, 120.0) is not None
            assert await services.runs.result(STRANGER, world.tinker_run, 1, 120.0) is not None
            assert (await services.datasets.create(STRANGER, world.dataset)).versions == []
            assert (await services.graders.create(STRANGER, CreateGrader(name=world.grader, spec={**CHECK, "operation": "ne"}))).version == 1
            assert (await services.deployments.create(STRANGER, world.deployment, "tiny", {})).live.version == BASE
            assert (await services.sampling.resolve(STRANGER, world.deployment)).weights.version == BASE
            assert (await services.sampling.resolve(ME, world.deployment)).weights.version == world.version

    play(tmp_path, story)


def test_what_is_published_can_be_read_everywhere_and_changed_at_home_only(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world = await populate(services)
            await services.publishing.publish(ME, world.path)
            found = await services.checkpoints.find(STRANGER, world.path)
            assert (found.run_id, found.base_model) == (world.run, "tiny")
            own = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, begins_with_load=True)
            await services.runs.load(STRANGER, own.id, 0, found, optimizer=True)
            assert await services.runs.result(STRANGER, own.id, 0, 120.0) is not None
            for change in (
                services.checkpoints.delete(STRANGER, world.path),
                services.checkpoints.set_ttl(STRANGER, world.path, 1),
                services.publishing.unpublish(STRANGER, world.path),
            ):
                with pytest.raises(NotFound):
                    await change
            for hidden in (services.runs.get(STRANGER, world.run), services.checkpoints.find(STRANGER, world.sampler_path)):
                with pytest.raises(NotFound):
                    await hidden
            assert (await services.checkpoints.list(STRANGER)).total == 0
            await services.publishing.unpublish(ME, world.path)
            with pytest.raises(NotFound):
                await services.checkpoints.find(STRANGER, world.path)

    play(tmp_path, story)


def test_garbage_is_collected_by_who_administers_the_server(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            with pytest.raises(Forbidden, match="project `other` alone"):
                await services.garbage.collect(STRANGER)
            assert (await services.garbage.collect(ME)).spans == 0

    play(tmp_path, story)


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public ones of a class."""
    return ((name, method) for name, method in vars(kind).items() if not name.startswith("_") and inspect.isfunction(method))


def verbs() -> dict[str, tuple[type, Callable[..., Any]]]:
    """Every public method of a service that is told who calls."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__}
    return {
        f"{kind.__name__}.{name}": (kind, method) for kind in kinds for name, method in methods(kind) if "p" in inspect.signature(method).parameters
    }


def refuses(verb: str, scopes: frozenset[str]) -> bool:
    """Whether the verb of an object that has nothing is Forbidden: whatever it does before it asks for a scope fails in another way."""
    kind, method = verbs()[verb]
    wanted = [parameter for parameter in inspect.signature(method).parameters.values() if parameter.default is parameter.empty][2:]
    given = {parameter.name: None for parameter in wanted}
    caller = Principal("default", "key-1", scopes)

    async def call() -> None:
        done = method(object.__new__(kind), caller, **given)
        if inspect.isawaitable(done):
            await done

    try:
        asyncio.run(call())
    except Forbidden:
        return True
    except Exception:
        return False
    raise AssertionError(f"{verb} did something without anything")


async def populate(services: Services) -> World:
    """One of everything in the default project, and what the stranger tries it with in the other."""
    session = await services.sessions.create(ME, tags=[], user_metadata={}, sdk_version="0")
    name = f"{session.id}:train:0"
    run = await services.runs.create(ME, base_model="tiny", lora=LORA, metadata={}, session_id=session.id, tinker_id=name)
    for seq in (1, 2):
        await services.runs.submit(ME, run.id, seq, operation(seq))
    await services.runs.checkpoint(ME, run.id, 3, "kept-by-default")
    await services.runs.snapshot(ME, run.id, 4, "served-by-default")
    await services.runs.snapshot(ME, run.id, 5, "exported-by-default", kind=EXTERNAL)
    assert isinstance(await services.runs.result(ME, run.id, 3, 120.0), CheckpointResult)
    assert isinstance(await services.runs.result(ME, run.id, 5, 120.0), SnapshotResult)
    await services.rollouts.add(ME, run.id, 1, ROLLOUTS)
    snapshot = await services.runs.result(ME, run.id, 4, 120.0)
    assert isinstance(snapshot, SnapshotResult)
    version = await services.versions.find(ME, snapshot.version)
    sampler = await services.sessions.create_sampling(ME, session.id, 0, version, None)
    await services.deployments.create(ME, "deployed-by-default", snapshot.version, {"why": "evidence-of-default"})
    await services.datasets.create(ME, "data-of-default")
    data = await services.datasets.import_rows(ME, "data-of-default", ROWS)
    await services.graders.create(ME, CreateGrader(name="grader-of-default", spec=CHECK))
    services.traffic.record(chat("span-of-default", episode_id="episode-of-default"))
    await services.feedback.give(ME, GiveFeedback(target="span-of-default", metric="m", value=True))
    await services.deployments.create(STRANGER, "own", "tiny", {})
    job = await services.jobs.create(ME, JobSpec(name="job-of-default", base_model="tiny", data=Data(dataset="data-of-default")))
    with TemporaryFile() as file:
        file.write(ROWS.splits["train"].encode())
        kept = await services.files.create(ME, NewFile(filename="file-of-default", purpose="fine-tune"), cast(BinaryIO, file), bytes(32))
        asked = await services.files.create(ME, NewFile(filename="asked-of-default", purpose="batch"), cast(BinaryIO, file), bytes(32))
    batch = await services.batches.create(ME, NewBatch(endpoint="/v1/embeddings", input_file=asked.id))
    upload = await services.uploads.create(ME, NewUpload(filename="upload-of-default", purpose="fine-tune", size_bytes=9))
    tuned = await services.fine_tuning.create(ME, FineTune(model="tiny", training_file=kept.id))
    await services.datasets.create(STRANGER, "own")
    await services.datasets.create(STRANGER, "own-rows")
    await services.datasets.import_rows(STRANGER, "own-rows", ROWS.model_copy(update={"splits": {"train": '{"text": "own", "label": "own"}'}}))
    await services.graders.create(STRANGER, CreateGrader(name="own", spec={**CHECK, "input": "{{ item.reference }}", "reference": "own"}))
    services.traffic.record(chat("own-span", project=STRANGER.project))
    await services.graders.create(ME, CreateGrader(name="own", spec={**CHECK, "input": "{{ item.reference }}"}))
    evaluated = await services.evaluations.create(ME, evaluation(name="evaluation-of-default", data="data-of-default"))
    theirs = await services.evaluations.create(STRANGER, evaluation(name="own-evaluation"))
    eval_ = await services.evals.create(ME, EVAL)
    run_of_eval = await services.evals.run(ME, eval_.id, RUN)
    async with asyncio.timeout(60):
        working = [(ME, evaluated.id), (ME, run_of_eval.id), (STRANGER, theirs.id)]
        while not all([(await services.evaluations.get(who, each)).state.ended for who, each in working]):
            await asyncio.sleep(0.01)
    return World(
        run=run.id,
        tinker_run=name,
        session=session.id,
        sampler=sampler.id,
        saved="kept-by-default",
        published="served-by-default",
        exported="exported-by-default",
        version=snapshot.version,
        deployment="deployed-by-default",
        dataset="data-of-default",
        dataset_version=data.id,
        manifest=data.manifest,
        grader="grader-of-default",
        span="span-of-default",
        episode="episode-of-default",
        eval=eval_.id,
        eval_run=run_of_eval.id,
        evaluation=evaluated.id,
        evaluation_name=evaluated.spec.name,
        job=job.id,
        job_name=job.spec.name,
        file=kept.id,
        tuned=tuned.job.id,
        upload=upload.id,
        asked=asked.id,
        batch=batch.id,
    )


async def refusal(attempt: Attempt, services: Services, world: World) -> str:
    """What the attempt is told, with the world's names replaced by what they are names of."""
    with pytest.raises(NotFound) as refused:
        await attempt(services, world)
    said = f"{refused.value.message} ({refused.value.field})"
    for field, value in sorted(world._asdict().items(), key=lambda item: -len(item[1])):
        said = said.replace(value, f"<{field}>")
    return said.replace("<tinker_run>", "<run>")


async def everything(services: Services, world: World) -> list[Any]:
    """The things of the default project as their owner sees them."""
    session: Session = await services.sessions.get(ME, world.session)
    return [
        (await services.runs.get(ME, world.run))._replace(updated_us=0),
        await services.checkpoints.list(ME),
        await services.rollouts.steps(ME, world.run),
        session,
        await services.sessions.samplers(ME, world.session),
        await services.deployments.get(ME, world.deployment),
        await services.deployments.swaps(ME, world.deployment),
        await services.datasets.get(ME, world.dataset),
        await services.graders.versions(ME, world.grader),
        await services.traffic.get(ME, world.span),
        await services.feedback.list(ME),
        await services.evaluations.items(ME, world.evaluation),
        await services.evals.get_run(ME, world.eval, world.eval_run),
        await services.jobs.get(ME, world.job),
        await services.jobs.events(ME, world.job),
        await services.files.list(ME),
        await services.fine_tuning.get(ME, world.tuned),
    ]


def chain(world: World) -> CreateChain:
    """Whose first stage trains on what is the stranger's own, and whose second does not."""
    stages = [("x", "own-rows", None), ("y", world.dataset, Begin(job="x"))]
    return CreateChain(stages=[JobSpec(name=name, base_model="tiny", data=Data(dataset=dataset), begin=begin) for name, dataset, begin in stages])


async def load_into_own(services: Services, world: World) -> None:
    """Begin a run of one's own with weights of somebody's."""
    run = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, begins_with_load=True)
    await services.runs.load(STRANGER, run.id, 0, await services.checkpoints.find(STRANGER, world.path), optimizer=True)


def config(directory: Path) -> ApiConfig:
    (directory / "api_key").write_text("tml-development-key\n")
    migrated(DataDir(directory).database)
    return ApiConfig(data_dir=str(directory), host="127.0.0.1", port=0, record="full", models=(fake_base(directory),))
