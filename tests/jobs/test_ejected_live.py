"""A job, the script that it is ejected as, and the tinker SDK with the same operations end with the same weights."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.types.jobs import (
    Batches,
    Clip,
    Data,
    DirectPreference,
    Distillation,
    Evaluation,
    Job,
    JobSpec,
    JobState,
    OddsRatioPreference,
    Optimizer,
    Reinforcement,
    Supervised,
)
from tests.jobs import through_tinker
from tests.jobs.test_methods_live import BASE, GRADER, chat, lines, pairs, preference, prompt
from tests.jobs.through_tinker import Learner
from tests.live import LiveServer
from tests.sdk import LEAVES_CONNECTIONS, connected

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
            client.datasets.add_version(f"ejected-{name}", {"train": lines([of(each) for each in pairs(32, 1)]), "eval": lines([of(pairs(1, 2)[0])])})
        client.graders.create("ejected-grader", {"type": "function", "source": GRADER, "entry": "score"})
        yield client


Ran = Callable[[str], Job]


@pytest.fixture(scope="module")
def ran(client: Client) -> Ran:
    """The job of a method, which is made once."""

    @cache
    def done(name: str) -> Job:
        data, method = METHODS[name]
        if isinstance(method, Distillation) and method.mode == "on_policy":
            # A model is no further from itself than nothing, and learns that.
            taught = done("sft").result
            assert taught is not None
            method = method.model_copy(update={"teacher": taught.version})
        loops = isinstance(method, Reinforcement | Distillation)
        evaluation = Evaluation(every=2, answers=1, max_tokens=8, served_every=0 if loops else 2)
        spec = JobSpec(name=f"ejected-{name}", base_model=BASE, data=Data(dataset=f"ejected-{data}"), method=method, evaluation=evaluation)
        spec = spec.model_copy(update={"checkpoint_every": 1 if loops else 0, "rank": 8, "seed": 3})
        job = client.jobs.wait(client.jobs.create(spec).id, 300)
        assert job.state is JobState.SUCCEEDED, job.reason
        return job

    return done


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_ejected_script_ends_with_the_weights_of_the_job(live_server: LiveServer, ran: Ran, method: str, tmp_path: Path) -> None:
    job = ran(method)
    assert job.result is not None
    environment = {**os.environ, "BLOOMERY_URL": live_server.url, "BLOOMERY_API_KEY": live_server.key}
    code = script(job.spec)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, code + done.stderr
    assert done.stdout.splitlines()[-1].split()[2:] == ["digest", job.result.digest]


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
