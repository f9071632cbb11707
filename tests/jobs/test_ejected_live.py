"""A job, the script that it is ejected as, and the tinker SDK with the same operations end with the same weights."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from bloomery.cli.eject import script
from bloomery.client import Client
from bloomery.jobs.rows import examples, rows_of
from bloomery.jobs.supervised import sft_config
from bloomery.recipes.dealing import deal
from bloomery.recipes.sft import datum, mean_weighted
from bloomery.render import ChatTokenizer
from bloomery.types.jobs import (
    Batches,
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
from tests.jobs.test_methods_live import BASE, GRADER, chat, lines, pairs, preference, prompt
from tests.live import LiveServer
from tests.sdk import LEAVES_CONNECTIONS, connected

SUPERVISED = Supervised(optimizer=Optimizer(learning_rate=4e-3, weight_decay=0.01, grad_clip_norm=1.0), batches=Batches(epochs=1, rows=8))
METHODS: dict[str, tuple[str, Any]] = {
    "sft": ("chats", SUPERVISED),
    "dpo": ("preferences", DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=0.5, rows=8))),
    "orpo": ("preferences", OddsRatioPreference(batches=Batches(epochs=0.5, rows=8))),
    "rft": ("prompts", Reinforcement(grader="ejected-grader", steps=2, groups_per_step=2, group_size=4, max_tokens=24)),
    "distill": ("prompts", Distillation(teacher=BASE, mode="teacher_answers", steps=2, prompts_per_step=2, max_tokens=24)),
}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        for name, of in (("chats", chat), ("preferences", preference), ("prompts", prompt)):
            client.datasets.create(f"ejected-{name}")
            client.datasets.add_version(f"ejected-{name}", {"train": lines([of(each) for each in pairs(32, 1)]), "eval": lines([of(pairs(1, 2)[0])])})
        client.graders.create("ejected-grader", {"type": "function", "source": GRADER, "entry": "score"})
        yield client


def ran(client: Client, name: str, data: str, method: Any) -> Job:
    evaluation = Evaluation(every=2, answers=1, max_tokens=8, served_every=0 if isinstance(method, Reinforcement | Distillation) else 2)
    spec = JobSpec(name=name, base_model=BASE, data=Data(dataset=f"ejected-{data}"), method=method, evaluation=evaluation, rank=8, seed=3)
    spec = spec.model_copy(update={"checkpoint_every": 1 if isinstance(method, Reinforcement | Distillation) else 0})
    job = client.jobs.wait(client.jobs.create(spec).id, 300)
    assert job.state is JobState.SUCCEEDED, job.reason
    return job


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_ejected_script_ends_with_the_weights_of_the_job(live_server: LiveServer, client: Client, method: str, tmp_path: Path) -> None:
    job = ran(client, f"ejected-{method}", *METHODS[method])
    assert job.result is not None
    environment = {**os.environ, "BLOOMERY_URL": live_server.url, "BLOOMERY_API_KEY": live_server.key}
    code = script(job.spec)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, code + done.stderr
    assert done.stdout.splitlines()[-1].split()[2:] == ["digest", job.result.digest]


@pytest.mark.slow
@LEAVES_CONNECTIONS
def test_the_same_operations_through_the_tinker_sdk_end_with_the_weights_of_the_job(live_server: LiveServer, client: Client) -> None:
    job = ran(client, "as-tinker", "chats", SUPERVISED)
    assert job.result is not None
    config = sft_config(job.spec)
    tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
    data = [datum(*each) for each in examples(rows_of(client, job.spec, "train"), tokenizer, 2048, "train")]
    batches = deal([1] * len(data), epochs=config.epochs, rows=config.batch_size, tokens=None, seed=config.seed)
    with connected(live_server) as service:
        run = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        for step, batch in enumerate(batches):
            rows = mean_weighted([data[place] for place in batch])
            told = [
                types.Datum(
                    model_input=types.ModelInput.from_ints(row.tokens.numpy().tolist()),
                    loss_fn_inputs={name: tinker.TensorData.from_numpy(array.numpy()) for name, array in row.inputs.items()},
                )
                for row in rows
            ]
            run.forward_backward(told, "cross_entropy").result()
            adam = config.adam
            run.optim_step(types.AdamParams(learning_rate=adam.rate(step, len(batches)), **adam.others)).result()
        run.save_state("as-tinker").result()
    del run, service
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    # The digest is shown with the run.
    mine = next(each for each in client.runs() if each.seed == 3 and not each.metadata and each.digest is not None)
    assert mine.digest == job.result.digest
