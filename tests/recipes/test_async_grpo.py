"""The asynchronous loop: admission, what comes too late, deaths, and that it learns."""

import math
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.admission import Admission
from bloomery.recipes.async_grpo import AsyncGrpoConfig, Makers, train, truncated
from bloomery.recipes.cursors import Cursor, _deciding, fingerprint
from bloomery.recipes.grpo import StepReport, measure
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Graded, Group, Rollout, RolloutConfig
from bloomery.types.errors import InvalidInput, Unavailable
from tests.live import LiveServer, wait_until
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL, Killed, Record, mortal_client
from tests.train.test_losses import float64, scored

ON_POLICY = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2, max_head_offpolicy_versions=0, concurrency=2)
STEPS = 2
OPERATIONS = 1 + 3 * STEPS
CURSOR = Cursor(run_id="run", fingerprint="f", step=0, round=0, seq=2, version="v", first="v", had_below=1, had=(3,))
WAIT_S = 120.0


def group(number: int, *, teaches: bool = True) -> Group:
    problem = PROBLEMS[0]
    rollouts = [Rollout(f"{number}.{member}", problem, (1,), (-1.0,), ("v",), stopped=True) for member in range(2)]
    return Group(number, problem, tuple(Graded(rollout, float(teaches and member), {}) for member, rollout in enumerate(rollouts)), ())


def makers(make: Callable[[int], Group], **options: float | str) -> Makers:
    return Makers(make, AsyncGrpoConfig(policy=POLICY, **{"groups_per_step": 2, "concurrency": 2, **options}), CURSOR)  # type: ignore[arg-type]


def test_no_more_groups_are_outstanding_than_there_is_room_for() -> None:
    admission = Admission(2)
    assert admission.enter()
    assert admission.enter()
    entered = threading.Event()
    third = threading.Thread(target=lambda: admission.enter() and entered.set())
    third.start()
    wait_until(lambda: bool(admission._waiting_since), WAIT_S)
    assert not entered.is_set()
    assert admission.outstanding == 2
    admission.leave(1)
    third.join(WAIT_S)
    assert entered.is_set()
    assert admission.outstanding == 2
    assert admission.take_idle_s() > 0
    assert admission.take_idle_s() == 0


def test_a_closed_door_lets_nobody_in_and_nobody_wait() -> None:
    admission = Admission(0)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(admission.enter()))
    waiting.start()
    admission.close()
    waiting.join(WAIT_S)
    assert answers == [False]
    assert not admission.enter()


def test_nobody_waits_for_a_trainer_whose_thread_has_ended() -> None:
    made: list[Admission] = []
    trainer = threading.Thread(target=lambda: made.append(Admission(0)))
    trainer.start()
    trainer.join(WAIT_S)
    answers: list[bool] = []
    maker = threading.Thread(target=lambda: answers.append(made[0].enter()), daemon=True)
    maker.start()
    maker.join(WAIT_S)
    assert answers == [False]


def test_groups_come_in_their_order_without_those_that_were_had() -> None:
    with makers(group) as running:
        first = running.take()
        running.admission.leave(2)
        second = running.take()
    assert sorted(one.number for one in [*first, *second]) == [1, 2, 4, 5]


def test_what_teaches_nothing_makes_room_for_others_and_is_told() -> None:
    # One maker: of several, one may still be at a number when another is done with a later one.
    with makers(lambda number: group(number, teaches=number % 3 == 0), max_head_offpolicy_versions=0, concurrency=1) as running:
        taken = running.take()
    assert [one.number for one in taken if one.number % 3 == 0] == [6, 9]
    assert {1, 2, 4, 5, 7, 8} <= {one.number for one in taken}


def test_what_is_kept_makes_a_step_whatever_it_teaches_and_makes_room_once_it_is_trained() -> None:
    with makers(lambda number: group(number, teaches=False), max_head_offpolicy_versions=0, concurrency=1, zero_variance="keep") as running:
        assert [one.number for one in running.take()] == [1, 2]
        assert running.admission.outstanding == 2


def test_a_cursor_of_before_groups_rewarded_alike_could_be_kept_is_of_a_loop_that_drops_them() -> None:
    before = asdict(ON_POLICY)
    del before["zero_variance"]
    assert _deciding(asdict(ON_POLICY)) == _deciding(before)
    assert fingerprint(PROBLEMS, replace(ON_POLICY, zero_variance="keep")) != fingerprint(PROBLEMS, ON_POLICY)


def test_a_wait_among_groups_that_teach_nothing_ends() -> None:
    with makers(lambda number: group(number, teaches=False), max_idle_groups=5) as running:
        assert len(running.take()) == 5


def test_a_group_that_does_not_come_is_missed_at_its_deadline() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def stuck(number: int) -> Group:
        begun.release()
        release.wait(WAIT_S)
        return group(number)

    with makers(stuck, group_timeout_s=0.2, max_head_offpolicy_versions=0) as running:
        assert all(begun.acquire(timeout=WAIT_S) for _ in range(2))
        with pytest.raises(Unavailable, match=r"no group was done within 0.2 s, 2 are outstanding"):
            running.take()
        release.set()


def test_an_error_of_a_maker_reaches_the_trainer() -> None:
    def broken(number: int) -> Group:
        raise InvalidInput("the prompt is too long", field="prompt")

    with makers(broken) as running, pytest.raises(InvalidInput, match="too long"):
        running.take()


@pytest.mark.parametrize(
    "options",
    [
        {"max_head_offpolicy_versions": -1},
        {"importance_cap": 0.5},
        {"importance_cap": math.nan},
        {"max_idle_groups": 0},
        {"group_timeout_s": math.inf},
        {"group_timeout_s": -1.0},
    ],
)
def test_staleness_that_means_nothing_is_refused_at_once(client: Client, tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput) as refused:
        train(client, PROBLEMS, Record().grade, replace(ON_POLICY, **options), tmp_path / "cursor", steps=1)  # type: ignore[arg-type]
    assert refused.value.field in options


def test_options_that_the_truncated_loss_would_drop_are_refused_at_once(client: Client, tmp_path: Path) -> None:
    config = replace(ON_POLICY, policy=replace(POLICY, loss_config=(("beta", 1.0),)))
    with pytest.raises(InvalidInput, match="`loss_config` has `beta`: `importance_sampling` has no such options") as refused:
        train(client, PROBLEMS, Record().grade, config, tmp_path / "cursor", steps=1)
    assert refused.value.field == "loss_config"
    assert not (tmp_path / "cursor").exists()


@pytest.mark.parametrize("cap", [1.0, 2.0, 5.0])
def test_truncation_is_the_loss_whose_gradient_ends_at_the_cap(cap: float) -> None:
    made = truncated(replace(ON_POLICY, importance_cap=cap))
    ratio, served = float64(0.001, 0.5, 1, 1.001, 1.999, 2.001, 4.9, 5.1, 300), float64(*(-0.1 * place - 7 for place in range(9)))
    for advantage in (ratio.new_full((9,), 1.5), ratio.new_full((9,), -0.5)):
        asked = {"logprobs": served, "advantages": advantage}
        _, whole = scored("importance_sampling", served + ratio.log(), **asked)
        _, truncates = scored(made.loss, served + ratio.log(), config=dict(made.loss_config), **asked)
        assert whole.tolist() == pytest.approx((-ratio * advantage).tolist(), rel=1e-12)
        assert truncates[ratio < cap].tolist() == pytest.approx(whole[ratio < cap].tolist(), rel=1e-12)
        assert truncates[ratio > cap].tolist() == pytest.approx((-cap * advantage)[ratio > cap].tolist(), rel=1e-12)
    ppo = PolicyConfig(base_model=BASE, loss="ppo")
    assert truncated(AsyncGrpoConfig(policy=ppo)) == ppo


@pytest.mark.slow
def test_without_staleness_it_is_the_synchronous_loop_to_the_bit(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    mine, other = Record(), Record()
    policy = train(client, PROBLEMS, mine.grade, ON_POLICY, tmp_path / "async", steps=STEPS, on_step=reports.append)
    same = grpo.GrpoConfig(policy=truncated(ON_POLICY), rollouts=SMALL, groups_per_step=2)
    synchronous = grpo.train(client, PROBLEMS, other.grade, same, tmp_path / "sync", steps=STEPS)
    assert [(report.metrics["lag/max"], report.metrics["ratio/k3"]) for report in reports] == [(0, 0)] * STEPS
    assert mine.seen == other.seen
    assert policy.run.save_checkpoint("end").result().digest == synchronous.run.save_checkpoint("end").result().digest


@pytest.mark.slow
def test_a_group_that_comes_too_late_is_measured_and_has_no_loss(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    third_step = threading.Event()
    record = Record()

    def grade(rollout: Rollout) -> float:
        if rollout.id.startswith("0."):
            assert third_step.wait(WAIT_S)
        return record.grade(rollout)

    def note(report: StepReport) -> None:
        reports.append(report)
        if report.step == 3:
            third_step.set()

    config = AsyncGrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=1, max_head_offpolicy_versions=1, concurrency=2)
    policy = train(client, PROBLEMS, grade, config, tmp_path / "cursor", steps=8, on_step=note)
    # A step is one group of one version here, so that it is too old as a whole or not at all.
    late = [report.metrics for report in reports if report.metrics["lag/max"] > 1]
    assert [report.metrics["lag/masked_share"] for report in reports] == [float(report.metrics["lag/max"] > 1) for report in reports]
    assert max(metrics["lag/max"] for metrics in late) >= 3
    assert not any("loss" in metrics for metrics in late)
    assert policy.run.state().step == 8 - len(late)
    assert policy.cursor.had_below + len(policy.cursor.had) == 8


@pytest.mark.slow
def test_a_loop_all_of_whose_rollouts_are_of_foreign_weights_says_so_and_goes_on_where_it_stopped(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[StepReport] = []
    sampler = client.sampler
    config = replace(ON_POLICY, max_lost_rounds=2, max_idle_groups=3)
    with monkeypatch.context() as patch:
        patch.setattr(client, "sampler", lambda version: sampler(BASE))
        with pytest.raises(Unavailable, match=r"2 rounds in a row .* 9 times `foreign_version` \(tokens of .* What to change: sample from the"):
            train(client, PROBLEMS, Record().grade, config, tmp_path / "cursor", steps=9, on_step=reports.append)
    assert [[(reason.kind, reason.attempts) for reason in report.failures] for report in reports] == [[("foreign_version", 9)]] * 2
    policy = train(client, PROBLEMS, Record().grade, replace(config, max_lost_rounds=5), tmp_path / "cursor", steps=3, on_step=reports.append)
    assert (reports[-1].step, reports[-1].failures, policy.run.state().step) == (3, (), 1)
    assert policy.cursor.had_below + len(policy.cursor.had) == 8


@pytest.mark.slow
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("operation", range(2, OPERATIONS + 1))
def test_a_loop_that_is_killed_goes_on_with_the_groups_that_it_has_not_had(
    live_server: LiveServer, tmp_path: Path, operation: int, heard: bool
) -> None:
    record, path = Record(), tmp_path / "cursor"
    with mortal_client(live_server, operation, heard=heard) as dying, pytest.raises(Killed):
        train(dying, PROBLEMS, record.grade, ON_POLICY, path, steps=STEPS)
    with Client(live_server.url, live_server.key) as client:
        policy = train(client, PROBLEMS, record.grade, ON_POLICY, path, steps=STEPS)
        assert (policy.run.state().step, policy.cursor.had_below, policy.run.next_seq) == (STEPS, 4, OPERATIONS + 1)
    assert all(len(graded) == 1 for graded in record.seen.values())


@pytest.mark.slow
def test_it_learns_the_pairs_as_well(client: Client, tmp_path: Path) -> None:
    task = PairsTask.of(client, BASE)
    held_out = task.problems(64, seed=1_000_000)
    evaluation = RolloutConfig(group_size=8, max_tokens=32, seed=99)
    config = AsyncGrpoConfig(policy=PolicyConfig(base_model=BASE, learning_rate=1e-3), rollouts=RolloutConfig(max_tokens=32, piece_tokens=16))
    before = measure(client.sampler(BASE), held_out, task.grade, evaluation)
    reports: list[StepReport] = []
    policy = train(client, task.problems(512, seed=0), task.grade, config, tmp_path / "cursor", steps=30, on_step=reports.append)
    after = measure(policy.sampler, held_out, task.grade, evaluation)
    assert before.interval.high < 0.2
    assert after.interval.low > 0.75
    assert max(report.metrics["lag/max"] for report in reports) >= 1
