"""A task of the published package, unmodified, on a live server: what it scores is what the `openai` SDK is answered."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.inspect_ai.setup import GONE, MODEL, OTHER, deploy, inspect, short
from tests.live import LiveServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(live_server: LiveServer) -> LiveServer:
    deploy(live_server)
    return live_server


def test_models_stand_beside_each_other_by_the_scorers_of_a_task(server: LiveServer, tmp_path: Path) -> None:
    done = inspect(server, tmp_path, "--model", OTHER, "--model", MODEL, "--model", GONE, "--json")
    assert done.exit_code == 1, "a sample failed, which the task does not allow"
    (task,) = json.loads(done.stdout)
    assert [(model["model"], sum(model["failures"].values())) for model in task["models"]] == [(OTHER, 1), (MODEL, 1), (GONE, 6)]
    assert [scorer["scored"] for scorer in task["models"][1]["scorers"]] == [5, 5, 5, 5, 4]
    assert {(pair["model"], pair["other"], pair["ties"]) for pair in task["differences"]} == {(OTHER, MODEL, 5), (OTHER, MODEL, 4)}, "one model"
    for model in task["models"][:2]:
        text = Path(model["log"]).read_text()
        assert server.key not in text
        log = json.loads(text)
        assert short(log)["results"]["completed_samples"] == 5
        with OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sdk:
            right = [assert_answered(sdk, model["model"], sample) for sample in log["samples"] if "error" not in sample]
        assert 0 < sum(right) < len(right), "either is to be seen"
        assert model["scorers"][0]["mean"]["value"] == model["scorers"][0]["metrics"]["accuracy"] == sum(right) / len(right)


def assert_answered(sdk: OpenAI, model: str, sample: dict[str, Any]) -> bool:
    """Whether it is right."""
    asked = sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": sample["input"]}], temperature=0, max_tokens=8)
    answer = asked.choices[0].message.content or ""
    assert sample["output"]["completion"] == answer
    return sample["target"].lower() in answer.lower()


def test_its_own_options_pass_through_and_a_task_that_ended_well_says_so(server: LiveServer, tmp_path: Path) -> None:
    done = inspect(server, tmp_path, "--model", MODEL, "--limit", "2", "--", "-T", "epochs=3", "--no-log-images")
    assert done.exit_code == 0, done.output
    assert f"{MODEL}: success, 6 samples, " in done.stdout
    assert "1 [0.3424, 1]" in done.stdout, "both samples have one answer, and Wilson's interval of 2 in 2"


def test_what_inspect_refuses_leaves_nothing(server: LiveServer, tmp_path: Path) -> None:
    done = inspect(server, tmp_path, "--model", MODEL, "--", "--unheard-of")
    assert done.exit_code == 2
    assert "without a log" in done.output
    assert not list(tmp_path.glob("bloomery-*"))
