"""Environments of the published package, unmodified: what they are answered is trained on by their own rubrics, and no fault is a reward."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bloomery.models import tiny
from tests.live import LiveServer
from tests.openai.tool_model import TEMPLATE
from tests.verifiers.setup import run

pytestmark = pytest.mark.slow

Row = dict[str, Any]
FAULTY = ["raises", "raises-later", "nan", "breaks", "crashes", "cold"]


@pytest.fixture(scope="module")
def rows(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Groups of the environments that do not wait for anything."""
    return run(live_server, tmp_path_factory.mktemp("verifiers"), "groups", "single", "multi", "two", *FAULTY)


def made(rows: list[Row], name: str) -> list[Row]:
    """The groups of an environment."""
    return [row for row in rows if row["name"] == name]


def test_a_rubric_is_the_reward_and_its_functions_are_the_parts(rows: list[Row]) -> None:
    for name in ("single", "two"):
        for group in made(rows, name):
            assert (len(group["members"]), group["failures"]) == (3, [])
            for member in group["members"]:
                parts = member["parts"]
                assert parts.keys() == {"has_the_answer", "short", "num_turns"}
                assert member["reward"] == pytest.approx(parts["has_the_answer"] + 0.5 * parts["short"])
                assert parts["short"] == 1 - len(member["wrote"].removesuffix("<|im_end|>")) / 64
                assert member["read"].startswith("<|im_start|>system\nAnswer with a number.<|im_end|>\n<|im_start|>user\nHow much ")


def test_a_row_of_the_dataset_is_a_problem_and_one_of_other_content_is_another(rows: list[Row]) -> None:
    single, multi, *_ = (row["problems"] for row in made(rows, "end"))
    assert [problem.partition("-")[0] for problem in single] == ["0", "1", "2"]
    # The system prompt is part of the row.
    assert not set(single) & set(multi)


def test_turns_and_their_own_rewards_are_the_environments(rows: list[Row]) -> None:
    for group in made(rows, "multi"):
        assert len(group["members"]) == 3
        for member in group["members"]:
            assert len(member["answers"]) == 2
            assert member["turns"] == [[member["answers"][1], 0.25]]
            assert member["parts"]["num_turns"] == 2
    assert "The list says 3." in made(rows, "multi")[0]["members"][0]["read"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "raised", "ValueError: the judge is away"),
        ("raises-later", "raised", "ValueError: the judge is away"),
        ("nan", "not_finite", "nan"),
        ("breaks", "raised", "ToolError('the list is lost')"),
        ("crashes", "raised", "RuntimeError: the list is lost"),
        ("cold", "raised", "`temperature` can only be 1"),
    ],
)
def test_what_goes_wrong_in_an_environment_is_a_failure_where_the_package_says_zero(rows: list[Row], name: str, kind: str, message: str) -> None:
    groups = made(rows, name)
    assert len(groups) == 2
    for group in groups:
        assert group["members"] == []
        assert [failure["kind"] for failure in group["failures"]] == [kind] * 3
        assert all(message in failure["message"] for failure in group["failures"])


def test_an_environment_that_waits_is_cancelled_at_its_deadline_or_ends_itself_and_both_are_late(live_server: LiveServer, tmp_path: Path) -> None:
    rows = run(live_server, tmp_path, "groups", "waits", "gives-up", "--timeout-s", "3")
    for name in ("waits", "gives-up"):
        late, fine = made(rows, name)
        assert [failure["kind"] for failure in late["failures"]] == ["timeout"] * 3
        assert (late["members"], len(fine["members"]), fine["failures"]) == ([], 3, [])
    assert [row["cancelled"] for row in made(rows, "end")] == [3, 6]


def test_an_environment_that_holds_the_event_loop_costs_those_beside_it_their_attempt_and_no_others(live_server: LiveServer, tmp_path: Path) -> None:
    held, fine = made(run(live_server, tmp_path, "groups", "blocks", "--timeout-s", "3"), "blocks")
    assert {failure["kind"] for failure in held["failures"]} == {"timeout"}
    assert (len(fine["members"]), fine["failures"]) == (3, [])


def test_tools_of_an_environment_are_told_to_the_model_called_by_it_and_answer_it(live_server: LiveServer, tmp_path: Path) -> None:
    """The package declares them `strict`, which the door refuses: the adapter does not ask for it."""
    template = tmp_path / "tokenizer"
    template.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(tiny.PATH / name, template)
    config = json.loads((tiny.PATH / "tokenizer_config.json").read_text())
    (template / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    apple, bread = made(run(live_server, tmp_path, "tools", "tool", "--tokenizer", str(template)), "tool")
    for group, count in ((apple, "3"), (bread, "12")):
        assert (len(group["members"]), group["failures"]) == (2, [])
        for member in group["members"]:
            assert '"description": "Count a thing in stock.' in member["read"]
            assert member["wrote"].startswith('<tool_call>\n{"name": "count"')
            assert f"<|im_start|>tool\n{count}<|im_end|>" in member["read"]
            assert (member["parts"]["count_calls"] >= 1, member["parts"]["num_turns"]) == (True, 2)
            # What the tool said was read, not written.
            assert f"tool\n{count}" not in member["wrote"]


def test_a_rubric_that_compares_rollouts_or_rates_none_is_refused(live_server: LiveServer, tmp_path: Path) -> None:
    refused = {row["name"]: row["refused"] for row in run(live_server, tmp_path, "refuse", "against", "unscored", "single")}
    assert refused.keys() == {"against", "unscored"}
    assert "rates rollouts against each other" in refused["against"]
    assert "every reward would be 0" in refused["unscored"]


def test_both_loops_train_on_an_environment(live_server: LiveServer, tmp_path: Path) -> None:
    rows = run(live_server, tmp_path, "train", "multi")
    for kind in ("grpo", "async_grpo"):
        steps = [row["metrics"] for row in made(rows, kind)]
        assert [row["step"] for row in made(rows, kind)] == [1, 2]
        for metrics in steps:
            assert metrics["gradient_norm"] > 0
            assert (metrics["groups/trained"], metrics["failures/lost"], metrics["agents/answers"]) == (2, 0, 2)
            assert {"reward/part/has_the_answer", "reward/part/short", "reward/part/num_turns", "reward/turns"} <= metrics.keys()
    assert all(row["metrics"]["ratio/k3"] == 0 for row in made(rows, "grpo"))
