"""A job, the script that it is ejected as, and the tinker SDK with the same operations end with the same weights."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, Job, JobResult, JobSpec, JobState
from bloomery.types.methods import Batches, Clip, DirectPreference, Distillation, OddsRatioPreference, Optimizer, Reinforcement, Supervised
from tests.jobs import through_tinker
from tests.jobs.test_methods_live import BASE, GRADER, chat, lines, pairs, preference, prompt
from tests.jobs.through_tinker import Learner
from tests.live import LiveServer
from tests.sdk import LEAVES_CONNECTIONS, connected

SPREAD = "def score(output):\n    return min(1.0, len(set(output)) / 24)\n"
SUPERVISED = Supervised(optimizer=Optimizer(learning_rate=4e-3, weight_decay=0.01, grad_clip_norm=1.0), batches=Batches(epochs=1, rows=8))
REINFORCED = Reinforcement(grader="ejected-grader", steps=2, groups_per_step=2, group_size=4, max_tokens=24)
METHODS: dict[str, tuple[str, Any]] = {
    "sft": ("chats", SUPERVISED),
    "dpo": ("preferences", DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=0.5, rows=8))),
    "orpo": ("preferences", OddsRatioPreference(batches=Batches(epochs=0.5, rows=8))),
    "rft": ("prompts", REINFORCED),
    "dapo": ("prompts", REINFORCED.model_copy(update={"loss": "dapo", "by_deviation": False, "temperature": 1.3})),
    "gspo": ("prompts", REINFORCED.model_copy(update={"loss": "gspo", "clip": Clip(low=0.9, high=1.1)})),
    "tempered": ("prompts", REINFORCED.model_copy(update={"temperature": 0.7, "kl_coefficient": 0.1})),
    "distill": ("prompts", Distillation(teacher=BASE, mode="teacher_answers", steps=2, prompts_per_step=2, max_tokens=24)),
    "on-policy": ("prompts", Distillation(teacher="of sft", mode="on_policy", steps=2, prompts_per_step=2, max_tokens=24)),
}
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 4e-4,
    "schedule": {"kind": "cosine", "warmup_share": 0.4, "floor": 0.3},
    "weight_decay": 0.02,
    "grad_clip_norm": 0.5,
    "beta1": 0.85,
    "beta2": 0.9,
    "eps": 1e-6,
}
"""With nothing of it as methods have it by themselves."""
OTHERWISE = {"train": "validation", "dataset": "ejected-prompts"}
STOPPING = {"patience": 1, "min_delta": 1000.0}
"""Ends with the second evaluation, whatever that says."""
LOOPED = {"optimizer": OPTIMIZER, "steps": 2, "max_tokens": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft-full": {
        "data": {"dataset": "ejected-chats", "train": "validation"},
        "rank": 0,
        "method": {"kind": "sft", "optimizer": OPTIMIZER, "batches": {"epochs": 1.5, "tokens": 300}},
    },
    "sft-stopped": {
        "data": {"dataset": "ejected-chats"},
        "alpha": 16.0,
        "evaluation": {"split": "validation", "every": 1, "rows": 2, "answers": 1, "max_tokens": 8},
        "checkpoint_every": 1,
        "method": {"kind": "sft", "optimizer": OPTIMIZER, "batches": {"epochs": 1, "rows": 4}, "early_stopping": STOPPING},
    },
    "sft-goes-on": {
        "data": {"dataset": "ejected-chats"},
        "alpha": 16.0,
        "begin": {"checkpoint": "step-1", "optimizer": True},
        "method": {"kind": "sft", "batches": {"epochs": 1, "rows": 16}},
    },
    "dpo-full": {
        "data": {"dataset": "ejected-preferences", "train": "validation"},
        "rank": 0,
        "begin": {"job": "sft-full", "optimizer": True},
        "evaluation": {"split": "eval", "every": 1, "rows": 2},
        "checkpoint_every": 1,
        "method": {
            "kind": "dpo",
            "optimizer": OPTIMIZER,
            "batches": {"epochs": 2, "rows": 4},
            "early_stopping": STOPPING,
            "beta": 0.3,
            "label_smoothing": 0.1,
        },
    },
    "dpo-goes-on": {
        "data": {"dataset": "ejected-preferences"},
        "alpha": 16.0,
        "begin": {"job": "sft-stopped"},
        "method": {"kind": "dpo", "batches": {"epochs": 0.5, "tokens": 500}},
    },
    "orpo-goes-on": {
        "data": {"dataset": "ejected-preferences", "train": "validation"},
        "alpha": 16.0,
        "begin": {"job": "sft-stopped", "optimizer": True},
        "evaluation": {"split": "train", "every": 1, "rows": 2},
        "checkpoint_every": 1,
        "method": {
            "kind": "orpo",
            "optimizer": OPTIMIZER,
            "batches": {"epochs": 3, "tokens": 500},
            "early_stopping": STOPPING,
            "odds_weight": 0.4,
        },
    },
    "orpo-full": {
        "data": {"dataset": "ejected-preferences"},
        "rank": 0,
        "method": {"kind": "orpo", "batches": {"epochs": 0.5, "rows": 8}},
    },
    "rft-full": {
        "data": OTHERWISE,
        "rank": 0,
        "begin": {"job": "sft-full"},
        "method": {"kind": "rft", "grader": "ejected-grader", "loss": "dapo", "groups_per_step": 2, "group_size": 4, **LOOPED},
    },
    "rft-goes-on": {
        "data": OTHERWISE,
        "alpha": 16.0,
        "begin": {"job": "sft-stopped", "optimizer": True},
        "evaluation": {"split": "train", "every": 1, "rows": 2},
        "checkpoint_every": 1,
        "method": {
            "kind": "rft",
            "grader": "ejected-grader",
            "grader_version": 1,
            "held_out_grader": "ejected-spread",
            "held_out_grader_version": 1,
            "held_out_share": 0.5,
            "loss": "gspo",
            "clip": {"low": 0.99, "high": 1.01},
            "groups_per_step": 2,
            "group_size": 3,
            "temperature": 0.8,
            "kl_coefficient": 0.2,
            "by_deviation": False,
            "zero_variance": "keep",
            "early_stopping": STOPPING,
            **LOOPED,
            "steps": 3,
        },
    },
    "distill-full": {
        "data": OTHERWISE,
        "rank": 0,
        "method": {"kind": "distill", "teacher": "of sft-full", "prompts_per_step": 2, "samples": 3, **LOOPED},
    },
    "distill-goes-on": {
        "data": OTHERWISE,
        "alpha": 16.0,
        "begin": {"job": "sft-stopped", "optimizer": True},
        "evaluation": {"split": "train", "every": 1, "rows": 2},
        "checkpoint_every": 1,
        "method": {
            "kind": "distill",
            "teacher": BASE,
            "mode": "teacher_answers",
            "prompts_per_step": 2,
            "samples": 3,
            "early_stopping": STOPPING,
            **LOOPED,
            "steps": 3,
        },
    },
}
"""Jobs of which together no field that weights could follow from is left as it is by itself."""
NOT_OF_WEIGHTS = {
    "name": "what it is called",
    "base_model": "there is one here",
    "data.version": "named in every job that was made, as the versions below",
    "method.teacher_version": "",
    "begin.job": "a begin has it, or the two below",
    "begin.run": "",
    "begin.checkpoint": "",
    "begin.gate.measure": "whether the job begins at all",
    "begin.gate.bound": "",
    "max_context": "refuses rows, and changes none",
    "evaluation.served_every": "looks; set in the jobs of every method, above",
    "evaluation.answers": "looks",
    "evaluation.max_tokens": "looks",
    "watch.action": "whether it ends as a job that failed",
    "tracking": "looks",
    "metadata": "looks",
    "method.agent": "tests/jobs/test_agents_live.py",
    "method.asynchronous": "not the same weights, which its script says: below",
    "method.max_staleness": "likewise",
}
LOOPS: list[tuple[str, Callable[[Learner], None]]] = [
    ("sft", through_tinker.sft),
    ("dpo", through_tinker.preferences),
    ("orpo", through_tinker.preferences),
    ("dpo", through_tinker.preferences_by_custom_loss),
    ("orpo", through_tinker.preferences_by_custom_loss),
    ("rft", through_tinker.rft),
    ("dapo", through_tinker.rft),
    ("gspo", through_tinker.rft),
    ("distill", through_tinker.distill),
    ("on-policy", through_tinker.distill),
]


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        for name, of in (("chats", chat), ("preferences", preference), ("prompts", prompt)):
            client.datasets.create(f"ejected-{name}")
            splits = {"train": pairs(32, 1), "eval": pairs(3, 2), "validation": pairs(8, 3)}
            client.datasets.add_version(f"ejected-{name}", {split: lines([*map(of, rows)]) for split, rows in splits.items()})
        client.graders.create("ejected-grader", {"type": "function", "source": GRADER, "entry": "score"})
        client.graders.create("ejected-spread", {"type": "function", "source": SPREAD, "entry": "score"})
        client.graders.waive("ejected-spread", "nothing is trained on it")
        yield client


Ran = Callable[[str], Job]


@pytest.fixture(scope="module")
def ran(client: Client) -> Ran:
    """The job of a method, or of other settings, which is made once."""

    @cache
    def done(name: str) -> Job:
        spec = of_method(name) if name in METHODS else of_settings(name)
        job = client.jobs.wait(client.jobs.create(spec).id, 300)
        assert job.state is JobState.SUCCEEDED, job.reason
        return job

    def of_method(name: str) -> JobSpec:
        data, method = METHODS[name]
        if isinstance(method, Distillation) and method.mode == "on_policy":
            # A model is no further from itself than nothing, and learns that.
            method = method.model_copy(update={"teacher": came_of("sft").version})
        loops = isinstance(method, Reinforcement | Distillation)
        evaluation = Evaluation(every=2, answers=1, max_tokens=8, served_every=0 if loops else 2)
        spec = JobSpec(name=f"ejected-{name}", base_model=BASE, data=Data(dataset=f"ejected-{data}"), method=method, evaluation=evaluation)
        return spec.model_copy(update={"checkpoint_every": 1 if loops else 0, "rank": 8, "seed": 3})

    def of_settings(name: str) -> JobSpec:
        given = {"name": f"ejected-{name}", "base_model": BASE, "rank": 8, "seed": 4} | SETTINGS[name]
        if (begin := given.get("begin")) is not None:
            before = came_of(begin.get("job", "sft-stopped"))
            place = {"job": f"ejected-{begin['job']}"} if "job" in begin else {"run": before.run}
            given["begin"] = begin | place
        if (teacher := given["method"].get("teacher", BASE)) != BASE:
            given["method"] = given["method"] | {"teacher": came_of(teacher.removeprefix("of ")).version}
        return JobSpec.model_validate(given)

    def came_of(name: str) -> JobResult:
        result = done(name).result
        assert result is not None
        return result

    return done


def ejected(server: LiveServer, job: Job, folder: Path) -> str:
    """What the script of a job says last."""
    environment = {**os.environ, "BLOOMERY_URL": server.url, "BLOOMERY_API_KEY": server.key}
    code = script(job.spec)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, code + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, *SETTINGS])
def test_the_ejected_script_ends_with_the_weights_of_the_job(live_server: LiveServer, ran: Ran, name: str, tmp_path: Path) -> None:
    job = ran(name)
    assert job.result is not None
    assert (job.progress.step < job.progress.steps) == ("early_stopping" in SETTINGS.get(name, {}).get("method", {}))
    assert ejected(live_server, job, tmp_path).split()[2:] == ["digest", job.result.digest]


@pytest.mark.slow
def test_the_script_of_asynchronous_reinforcement_says_that_its_weights_are_others_and_trains(
    live_server: LiveServer, client: Client, ran: Ran, tmp_path: Path
) -> None:
    begin = {"job": ran("sft-stopped").id}
    method = {"kind": "rft", "grader": "ejected-grader", "asynchronous": True, "max_staleness": 2, "groups_per_step": 2, "group_size": 4, **LOOPED}
    given = {"name": "ejected-asynchronous", "base_model": BASE, "data": OTHERWISE, "alpha": 16.0, "rank": 8, "begin": begin, "method": method}
    job = client.jobs.wait(client.jobs.create(JobSpec.model_validate(given)).id, 300)
    assert job.state is JobState.SUCCEEDED, job.reason
    code = script(job.spec)
    assert "not the same weights" in code
    assert "so the same weights" not in code
    assert "max_head_offpolicy_versions=2" in code
    assert ejected(live_server, job, tmp_path).startswith("version ")


def test_every_field_that_weights_could_follow_from_is_in_a_job_that_is_ejected() -> None:
    for method in (Supervised, DirectPreference, OddsRatioPreference, Reinforcement, Distillation):
        kind = method.model_fields["kind"].default
        of_kind = [given for given in SETTINGS.values() if given["method"]["kind"] == kind]
        for field in sorted({*leaves(JobSpec, {"method": method})} - {*NOT_OF_WEIGHTS, "method.kind", "seed"}):
            assert any(field in {*named(given)} for given in of_kind), f"no job of {kind} has another `{field}` than by itself"


def leaves(model: type[BaseModel], instead: dict[str, type[BaseModel]], above: str = "") -> Iterator[str]:
    """The fields of a model with those of the models within, with dots; `instead` of a union stands one of it."""
    for name, field in model.model_fields.items():
        parts = [instead[name]] if name in instead else get_args(field.annotation) or [field.annotation]
        inner = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        yield from (leaf for part in inner for leaf in leaves(part, instead, f"{above}{name}."))
        if not inner:
            yield f"{above}{name}"


def named(given: dict[str, Any], above: str = "") -> Iterator[str]:
    """The fields that a spec says something of."""
    for name, value in given.items():
        yield from named(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"]


@pytest.mark.slow
@LEAVES_CONNECTIONS
@pytest.mark.parametrize(("method", "loop"), LOOPS, ids=[f"{method}-{loop.__name__}" for method, loop in LOOPS])
def test_the_same_operations_through_the_tinker_sdk_end_with_the_weights_of_the_job(
    live_server: LiveServer, client: Client, ran: Ran, method: str, loop: Callable[[Learner], None]
) -> None:
    job = ran(method)
    assert job.result is not None
    with connected(live_server) as service:
        learner = Learner(service, client, job.spec)
        begun = learner.digest("begun")
        loop(learner)
        assert learner.digest("final") == job.result.digest != begun
    del learner, service
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
