"""The synchronous loop on the live server: on policy to the bit, the same after a death at any operation, and it learns."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.recipes import async_grpo
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport, measure, problem_of, train
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Problem, Rollout, RolloutConfig
from bloomery.types.errors import Conflict, InvalidInput, Unavailable
from tests.live import LiveServer, running_server, wait_until
from tests.recipes.loops import BASE, LONG, POLICY, PROBLEMS, SMALL, InTheMiddle, Killed, Record, mortal_client
from tests.test_docs import ROOT, blocks

CONFIG = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2)
STEPS = 2
OPERATIONS = 1 + 3 * STEPS


@pytest.fixture(scope="module")
def undisturbed(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Record]:
    record = Record()
    with Client(live_server.url, live_server.key) as client:
        policy = train(client, PROBLEMS, record.grade, CONFIG, tmp_path_factory.mktemp("loop") / "cursor", steps=STEPS)
        return policy.run.save_checkpoint("end").result().digest, record


def test_a_step_is_on_policy_to_the_bit_and_says_what_it_did(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    policy = train(client, PROBLEMS, Record().grade, CONFIG, tmp_path / "cursor", steps=STEPS, on_step=reports.append)
    assert [report.step for report in reports] == [1, 2]
    assert reports[-1].version == policy.cursor.version
    for report in reports:
        assert (report.metrics["ratio/k3"], report.metrics["ratio/largest_difference"], report.metrics["lag/max"]) == (0, 0, 0)
        assert (report.metrics["groups/made"], report.metrics["groups/trained"], report.metrics["failures/lost"]) == (2, 2, 0)
        assert report.metrics["gradient_norm"] > 0
        assert 0 < report.metrics["idle/trainer_share"] < 1
    assert policy.run.state().step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("operation", range(1, OPERATIONS + 1))
def test_a_loop_that_is_killed_at_any_operation_goes_on_with_the_same_groups_to_the_same_weights(
    live_server: LiveServer, tmp_path: Path, undisturbed: tuple[str, Record], operation: int, heard: bool
) -> None:
    digest, expected = undisturbed
    record, path = Record(), tmp_path / "cursor"
    with mortal_client(live_server, operation, heard=heard) as dying, pytest.raises(Killed):
        train(dying, PROBLEMS, record.grade, CONFIG, path, steps=STEPS)
    with Client(live_server.url, live_server.key) as client:
        policy = train(client, PROBLEMS, record.grade, CONFIG, path, steps=STEPS)
        assert policy.run.state().step == STEPS
        assert policy.run.save_checkpoint("end").result().digest == digest
    assert record.seen == expected.seen


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "dapo", "dppo", "dro", "reinforce", "stable_reinforce"])
def test_every_loss_of_the_server_takes_what_rollouts_give(client: Client, tmp_path: Path, loss: str) -> None:
    reports: list[StepReport] = []
    config = replace(CONFIG, policy=replace(POLICY, loss=loss))
    train(client, PROBLEMS, Record().grade, config, tmp_path / "cursor", steps=1, on_step=reports.append)
    assert reports[0].metrics["gradient_norm"] > 0
    assert reports[0].metrics["ratio/k3"] == 0


def test_failed_members_change_nothing_but_their_own_group(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []

    def grade(rollout: Rollout) -> float | None:
        return None if rollout.id in ("0.1", "1.0", "1.2") else float(sum(rollout.tokens))

    train(client, PROBLEMS, grade, CONFIG, tmp_path / "cursor", steps=1, on_step=reports.append)  # type: ignore[arg-type]
    metrics = reports[0].metrics
    assert (metrics["failures/lost"], metrics["failures/no_reward"], metrics["failures/retried"]) == (3, 9, 6)
    assert (metrics["groups/trained"], metrics["groups/too_small"]) == (1, 1)
    assert metrics["reward/raw"] > 100


def test_a_malformed_reward_loses_its_rollout_and_not_the_loop(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    told: dict[str, dict[str, Any]] = {
        "0.0": {"parts": {"x": "bad"}},
        "0.1": {"parts": {"x": math.nan}},
        "1.0": {"value": 10**400},
        "1.1": {"value": 1e308},
        "2.0": {"turns": None},
        "3.0": {"parts": None},
    }

    def grade(rollout: Rollout) -> Reward:
        return Reward(**{"rollout_id": rollout.id, "value": float(sum(rollout.tokens)), "parts": {"x": 1.0}} | told.get(rollout.id, {}))

    config = replace(CONFIG, groups_per_step=4, rollouts=replace(SMALL, attempts=1))
    train(client, PROBLEMS, grade, config, tmp_path / "cursor", steps=1, on_step=reports.append)
    metrics = reports[0].metrics
    assert (metrics["failures/lost"], metrics["failures/wrong_type"], metrics["failures/not_finite"]) == (6, 3, 3)
    assert (metrics["groups/trained"], metrics["groups/too_small"], metrics["reward/part/x"]) == (2, 2, 1)
    assert metrics["reward/raw"] > 100
    assert {(reason.kind, reason.attempts) for reason in reports[0].failures} == {("wrong_type", 1), ("not_finite", 1)}
    assert "`parts.x` is a str, not a number" in {reason.message for reason in reports[0].failures}
    assert json.dumps(metrics, allow_nan=False)


def test_a_loop_from_which_nothing_comes_back_says_why_and_goes_on_where_it_stopped(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []

    def broken(rollout: Rollout) -> float:
        raise OSError(f"the judge is away, asked of {rollout.id}")

    with pytest.raises(Unavailable, match=r"3 rounds in a row .* 18 times `raised` \(OSError: the judge is away, asked of 4.0\).* mend the grader"):
        train(client, PROBLEMS, broken, CONFIG, tmp_path / "cursor", steps=9, on_step=reports.append)
    assert [(report.step, report.failures[0].attempts) for report in reports] == [(1, 18), (2, 18), (3, 18)]
    config = replace(CONFIG, max_lost_rounds=7)
    policy = train(client, PROBLEMS, Record().grade, config, tmp_path / "cursor", steps=4, on_step=reports.append)
    assert (reports[-1].step, reports[-1].failures, policy.run.state().step) == (4, (), 1)


def test_a_step_that_teaches_nothing_trains_nothing(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    config = replace(CONFIG, max_lost_rounds=1)
    policy = train(client, PROBLEMS, lambda _: 1.0, config, tmp_path / "cursor", steps=2, on_step=reports.append)
    assert [report.metrics["groups/zero_variance_share"] for report in reports] == [1, 1]
    assert (policy.run.state().step, policy.cursor.had_below) == (0, 4)


def test_groups_rewarded_alike_that_are_kept_count_in_the_mean_and_are_held_to_the_first_weights(client: Client, tmp_path: Path) -> None:
    tokens: dict[str, int] = {}

    def grade(rollout: Rollout) -> float:
        tokens[rollout.id] = len(rollout.tokens)
        return float(sum(rollout.tokens)) if rollout.id in ("0.0", "0.1", "0.2", "2.0", "2.1", "2.2") else 1.0

    def trained(name: str, **settings: Any) -> tuple[str, list[dict[str, float]]]:
        reports: list[StepReport] = []
        policy = train(client, PROBLEMS, grade, replace(CONFIG, **settings), tmp_path / name, steps=2, on_step=reports.append)
        return policy.run.save_checkpoint("end").result().digest, [report.metrics for report in reports]

    left_out, dropped = trained("dropped")
    assert trained("by itself", zero_variance="drop")[0] == left_out
    digest, kept = trained("kept", zero_variance="keep")
    assert digest != left_out
    assert [(step["groups/trained"], step["groups/zero_variance_share"]) for step in (dropped[0], kept[0])] == [(1, 0.5), (2, 0.5)]
    differ, alike = (sum(tokens[f"{group}.{member}"] for member in range(3)) for group in range(2))
    assert kept[0]["gradient_norm"] / dropped[0]["gradient_norm"] == pytest.approx(differ / (differ + alike), rel=1e-4)
    # Without a pull they have no gradient, and are not sent at all.
    assert kept[0]["tokens/trained"] == dropped[0]["tokens/trained"]
    pulled = trained("pulled", zero_variance="keep", kl_coefficient=0.5)[1]
    assert pulled[1]["tokens/trained"] > kept[1]["tokens/trained"]


@pytest.mark.slow
def test_the_pull_to_the_first_weights_is_nothing_at_first_and_something_later(client: Client, tmp_path: Path) -> None:
    digests = []
    for number, coefficient in enumerate((0.0, 0.5)):
        config = GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, kl_coefficient=coefficient)
        policy = train(client, PROBLEMS, Record().grade, config, tmp_path / f"cursor{number}", steps=1)
        digests.append(policy.run.save_checkpoint("one").result().digest)
        train(client, PROBLEMS, Record().grade, config, tmp_path / f"cursor{number}", steps=2)
        digests.append(client.run(policy.run.id).save_checkpoint("two").result().digest)
    assert digests[0] == digests[2]
    assert digests[1] != digests[3]


def test_every_problem_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    epochs = [[problem_of(PROBLEMS, group, seed=1).id for group in range(5 * epoch, 5 * epoch + 5)] for epoch in range(4)]
    assert all(sorted(epoch) == [problem.id for problem in PROBLEMS] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert [problem_of(PROBLEMS, group, seed=2).id for group in range(20)] != [name for epoch in epochs for name in epoch]


@pytest.mark.parametrize(
    ("problems", "message"), [([], "no problems"), ([PROBLEMS[0]] * 2, "two problems have one id"), ([Problem("empty", ())], "empty prompt")]
)
def test_problems_that_cannot_be_trained_on_are_refused_at_once(client: Client, tmp_path: Path, problems: list[Problem], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        train(client, problems, Record().grade, CONFIG, tmp_path / "cursor", steps=1)
    assert not (tmp_path / "cursor").exists()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (GrpoConfig(policy=POLICY, min_group_size=1), "min_group_size"),
        (GrpoConfig(policy=POLICY, rollouts=RolloutConfig(group_size=1)), "min_group_size"),
        (GrpoConfig(policy=POLICY, groups_per_step=0), "groups_per_step"),
        (GrpoConfig(policy=POLICY, zero_variance="count"), "zero_variance"),  # type: ignore[arg-type]
        (GrpoConfig(policy=POLICY, max_lost_rounds=0), "max_lost_rounds"),
        (GrpoConfig(policy=POLICY, rollouts=RolloutConfig(attempts=0)), "attempts"),
        (GrpoConfig(policy=POLICY, rollouts=RolloutConfig(piece_tokens=0)), "piece_tokens"),
        (AsyncGrpoConfig(policy=POLICY), "config"),
        (GrpoConfig(policy=POLICY, rollouts=RolloutConfig(grade_timeout_s=math.inf)), "grade_timeout_s"),
        (GrpoConfig(policy=POLICY, evaluation=RolloutConfig(sample_timeout_s=0)), "sample_timeout_s"),
        (GrpoConfig(policy=replace(POLICY, training_timeout_s=math.nan)), "training_timeout_s"),
        (GrpoConfig(policy=replace(POLICY, learning_rate=math.nan)), "learning_rate"),
        (GrpoConfig(policy=POLICY, kl_coefficient=math.inf), "kl_coefficient"),
    ],
)
def test_settings_that_mean_nothing_are_refused_at_once(client: Client, tmp_path: Path, config: GrpoConfig, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        train(client, PROBLEMS, Record().grade, config, tmp_path / "cursor", steps=1)
    assert refused.value.field == field


@pytest.mark.slow
def test_the_python_of_the_page_runs(live_server: LiveServer, tmp_path: Path) -> None:
    (_, first), (_, recorded) = blocks(ROOT / "docs" / "rl-loops.md")
    code = f"{first}\n{recorded}".replace("steps=6", "steps=1")
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    code = code.replace("http://127.0.0.1:8700", live_server.url).replace("steps=5", "steps=1")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups/made"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--asynchronous"]])
def test_the_program_goes_on_where_it_was_stopped(live_server: LiveServer, tmp_path: Path, options: list[str]) -> None:
    environment = {**os.environ, "BLOOMERY_API_KEY": live_server.key}
    argv = [sys.executable, "-m", "bloomery.recipes.learn_pairs", "--url", live_server.url, "--cursor", str(tmp_path / "cursor"), *options]
    for steps, told in ((2, [1, 2]), (3, [3])):
        done = subprocess.run([*argv, "--steps", str(steps)], env=environment, capture_output=True, text=True, timeout=300, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["kind"] for row in rows] == ["before", *["step"] * len(told), "after"]
        assert [(row["step"], row["failures"]) for row in rows if row["kind"] == "step"] == [(step, []) for step in told]


LOOP = """
import sys
from pathlib import Path
from bloomery.client import Client
from bloomery.recipes.grpo import train
from tests.recipes.loops import PROBLEMS, Record
from tests.recipes.test_grpo import CONFIG
with Client(sys.argv[1], sys.argv[2]) as client:
    train(client, PROBLEMS, Record().grade, CONFIG, Path(sys.argv[3]), steps=1000)
"""


@pytest.mark.slow
def test_a_loop_killed_by_the_system_goes_on_to_the_weights_of_an_undisturbed_one(live_server: LiveServer, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    loop = subprocess.Popen([sys.executable, "-c", LOOP, live_server.url, live_server.key, str(path)])
    wait_until(lambda: path.exists() and '"round": 3' in path.read_text())
    os.kill(loop.pid, signal.SIGKILL)
    loop.wait(120)
    finished = train(client, PROBLEMS, Record().grade, CONFIG, path, steps=6)
    undisturbed = train(client, PROBLEMS, Record().grade, CONFIG, tmp_path / "other", steps=6)
    assert finished.run.save_checkpoint("end").result().digest == undisturbed.run.save_checkpoint("end").result().digest


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["api", f"engine-{BASE}"])
def test_a_loop_outlives_the_deaths_of_its_server(live_server: LiveServer, client: Client, tmp_path: Path, victim: str) -> None:
    record, expected = Record(), Record()
    with running_server(tmp_path / "data") as server, Client(server.url, server.key) as mortal:

        def kill(report: StepReport) -> None:
            if report.step in (2, 4):
                os.kill(server.pid(victim), signal.SIGKILL)

        policy = train(mortal, PROBLEMS, record.grade, CONFIG, tmp_path / "cursor", steps=6, on_step=kill)
        digest = policy.run.save_checkpoint("end").result().digest
    undisturbed = train(client, PROBLEMS, expected.grade, CONFIG, tmp_path / "other", steps=6)
    assert digest == undisturbed.run.save_checkpoint("end").result().digest
    assert record.seen == expected.seen


ELSEWHERE = """
import sys
from pathlib import Path
from bloomery.recipes.cursors import alone
with alone(Path(sys.argv[1])):
    print("alone", flush=True)
    sys.stdin.read()
"""


def test_a_loop_that_runs_elsewhere_is_not_run_twice_and_one_that_was_killed_is_taken_up(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loop:
        assert loop.stdout is not None
        assert loop.stdout.readline() == b"alone\n"
        for begun, config in ((train, CONFIG), (async_grpo.train, AsyncGrpoConfig(policy=POLICY))):
            with pytest.raises(Conflict, match=r"another process goes on from the cursor .* at this moment: stop it first"):
                begun(client, PROBLEMS, Record().grade, config, path, steps=1)  # type: ignore[operator]
        assert not path.exists()
        loop.kill()
    assert train(client, PROBLEMS, Record().grade, CONFIG, path, steps=0).cursor.version


IN_THE_MIDDLE = replace(CONFIG, rollouts=LONG)
MIDDLE = """
import os
import signal
import sys
from pathlib import Path
from bloomery.client import Client
from bloomery.recipes.grpo import train
from tests.recipes.loops import PROBLEMS, InTheMiddle, Record
from tests.recipes.test_grpo import IN_THE_MIDDLE
middle = InTheMiddle(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
with Client(sys.argv[1], sys.argv[2], transport=middle) as client:
    train(client, PROBLEMS, middle.within(Record().grade), IN_THE_MIDDLE, Path(sys.argv[3]), steps=3)
"""


@pytest.mark.slow
def test_a_loop_killed_while_it_grades_with_rollouts_in_flight_goes_on_to_the_same_weights(
    live_server: LiveServer, client: Client, tmp_path: Path
) -> None:
    path, record, expected = tmp_path / "cursor", Record(), Record()
    loop = subprocess.Popen([sys.executable, "-c", MIDDLE, live_server.url, live_server.key, str(path)], cwd=ROOT)
    assert loop.wait(300) == -signal.SIGKILL
    assert json.loads(path.read_text())["round"] == 1
    finished = train(client, PROBLEMS, record.grade, IN_THE_MIDDLE, path, steps=3)
    undisturbed = train(client, PROBLEMS, expected.grade, IN_THE_MIDDLE, tmp_path / "other", steps=3)
    assert finished.run.save_checkpoint("end").result().digest == undisturbed.run.save_checkpoint("end").result().digest
    assert record.seen == {name: expected.seen[name] for name in record.seen}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["api", f"engine-{BASE}"])
def test_a_server_killed_while_a_group_is_graded_and_another_in_flight_costs_neither_groups_nor_bits(
    live_server: LiveServer, client: Client, tmp_path: Path, victim: str
) -> None:
    record, expected, reports = Record(), Record(), []
    with running_server(tmp_path / "data") as server:
        middle = InTheMiddle(1, lambda: os.kill(server.pid(victim), signal.SIGKILL))
        with Client(server.url, server.key, transport=middle, patience_s=300) as mortal:
            policy = train(mortal, PROBLEMS, middle.within(record.grade), IN_THE_MIDDLE, tmp_path / "cursor", steps=3, on_step=reports.append)
            digest = policy.run.save_checkpoint("end").result().digest
        assert middle.killed
    undisturbed = train(client, PROBLEMS, expected.grade, IN_THE_MIDDLE, tmp_path / "other", steps=3)
    assert digest == undisturbed.run.save_checkpoint("end").result().digest
    assert record.seen == expected.seen
    assert [report.metrics["failures/lost"] for report in reports] == [0] * 3


@pytest.mark.slow
def test_the_model_that_ships_learns_the_pairs(client: Client, tmp_path: Path) -> None:
    task = PairsTask.of(client, BASE)
    held_out = task.problems(64, seed=1_000_000)
    evaluation = RolloutConfig(group_size=8, max_tokens=32, seed=99)
    config = GrpoConfig(policy=PolicyConfig(base_model=BASE, learning_rate=1e-3), rollouts=RolloutConfig(max_tokens=32))
    before = measure(client.sampler(BASE), held_out, task.grade, evaluation)
    policy = train(client, task.problems(512, seed=0), task.grade, config, tmp_path / "cursor", steps=30)
    after = measure(policy.sampler, held_out, task.grade, evaluation)
    assert before.interval.high < 0.2
    assert after.interval.low > 0.75
