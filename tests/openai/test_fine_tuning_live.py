"""Fine-tuning over the unmodified `openai` SDK on a real server: a file in, a model out that answers under its name."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob

from tests.jobs.test_methods_live import answer, asked, chat, lines, pairs, preference, prompt
from tests.live import LiveServer, wait_until

BASE = "bloomery-tiny"
RIGHT = {
    "type": "python",
    "name": "right",
    "source": "import json\n\ndef grade(sample, item):\n"
    "    try:\n        said = json.loads(sample['output_text'])\n    except ValueError:\n        return 0.0\n"
    "    if not isinstance(said, dict):\n        return 0.0\n"
    "    return sum(said.get(key) == value for key, value in item['pairs'].items()) / len(item['pairs'])\n",
}


@pytest.fixture
def sdk(live_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as client:
        yield client


def uploaded(sdk: OpenAI, rows: list[Any]) -> str:
    return sdk.files.create(file=("rows.jsonl", lines(rows).encode()), purpose="fine-tune").id


def done(sdk: OpenAI, **options: Any) -> FineTuningJob:
    """A job of its own that succeeded."""
    job = sdk.fine_tuning.jobs.create(seed=1, **options)
    wait_until(lambda: sdk.fine_tuning.jobs.retrieve(job.id).status in ("succeeded", "failed", "cancelled"), 300)
    ended = sdk.fine_tuning.jobs.retrieve(job.id)
    assert ended.status == "succeeded", ended.error
    assert ended.fine_tuned_model is not None
    return ended


def right(sdk: OpenAI, model: str) -> int:
    """How many questions that were trained on are answered to the letter."""
    given = pairs(64, 1)[:8]
    said = [sdk.chat.completions.create(model=model, messages=asked(each), temperature=0, max_tokens=60) for each in given]
    return sum(each.choices[0].message.content == answer(wanted)["content"] for each, wanted in zip(said, given, strict=True))


@pytest.mark.slow
def test_a_file_becomes_a_model_that_answers_and_is_trained_further(sdk: OpenAI) -> None:
    rows, held_out = uploaded(sdk, [chat(each) for each in pairs(64, 1)]), uploaded(sdk, [chat(each) for each in pairs(8, 2)])
    hyperparameters = {"n_epochs": 6, "batch_size": 8, "learning_rate_multiplier": 4}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    first = done(sdk, model=BASE, training_file=rows, validation_file=held_out, method=method, suffix="pairs")
    assert first.trained_tokens
    assert right(sdk, first.fine_tuned_model or "") > right(sdk, BASE)
    kept = list(sdk.fine_tuning.jobs.checkpoints.list(first.id))
    assert [each.step_number for each in kept] == [48, 40, 32, 24, 16, 8]
    assert kept[0].fine_tuned_model_checkpoint == first.fine_tuned_model
    losses = [each.metrics.train_loss for each in kept]
    assert losses[0] < losses[-1]
    assert all(each.metrics.valid_loss is not None for each in kept)
    assert (
        sdk.chat.completions.create(
            model=kept[-1].fine_tuned_model_checkpoint, messages=[{"role": "user", "content": "x"}], max_tokens=4
        ).system_fingerprint
        == kept[-1].fine_tuned_model_checkpoint
    )
    assert sdk.files.content(first.result_files[0]).text.startswith("step,")
    metrics = [event for event in sdk.fine_tuning.jobs.list_events(first.id, limit=7) if event.type == "metrics"]
    assert [json.loads(json.dumps(event.data))["step"] for event in metrics] == list(range(48, 0, -1))

    preferences = uploaded(sdk, [preference(each) for each in pairs(16, 1)])
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1}}}
    second = done(sdk, model=first.fine_tuned_model, training_file=preferences, method=how)
    assert second.fine_tuned_model not in (None, first.fine_tuned_model)

    prompts, others = (uploaded(sdk, [prompt(each) for each in pairs(count, seed)]) for count, seed in ((16, 1), (4, 2)))
    options = {"n_epochs": 2, "batch_size": 8, "eval_interval": 2}
    graded: Any = {"type": "reinforcement", "reinforcement": {"grader": RIGHT, "hyperparameters": options}}
    third = done(sdk, model=first.fine_tuned_model, training_file=prompts, validation_file=others, method=graded)
    assert third.fine_tuned_model not in (None, first.fine_tuned_model)
    of_rewards = list(sdk.fine_tuning.jobs.checkpoints.list(third.id))
    assert of_rewards[0].fine_tuned_model_checkpoint == third.fine_tuned_model
    assert {each.step_number for each in of_rewards} <= {2, 3, 4}
    metrics = [event.data for event in sdk.fine_tuning.jobs.list_events(third.id, limit=20) if event.type == "metrics"]
    assert sorted(each["step"] for each in metrics if "evaluation/reward" in each) == [2, 4]


@pytest.mark.slow
def test_a_running_job_is_cancelled_and_its_checkpoints_stay(sdk: OpenAI) -> None:
    rows = uploaded(sdk, [chat(each) for each in pairs(64, 1)])
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 900, "batch_size": 8}}}
    job = sdk.fine_tuning.jobs.create(model=BASE, training_file=rows, method=method, seed=1).id
    wait_until(lambda: bool(sdk.fine_tuning.jobs.checkpoints.list(job).data))
    assert sdk.fine_tuning.jobs.retrieve(job).estimated_finish
    sdk.fine_tuning.jobs.cancel(job)
    wait_until(lambda: sdk.fine_tuning.jobs.retrieve(job).status == "cancelled")
    assert sdk.fine_tuning.jobs.checkpoints.list(job).data
    with pytest.raises(openai.ConflictError):
        sdk.fine_tuning.jobs.resume(job)
