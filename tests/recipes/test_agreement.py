"""Loops hold updates on policy to what was served, before they are taken over: other numbers end the loop, and a restart does not learn them."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.client import Client, sampling
from bloomery.client.sample_message import SampleAnswer
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.advantages import Weighed, mean_over_tokens, weigh
from bloomery.recipes.agreement import Held, promises_bits
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.policy import Policy
from bloomery.recipes.rollouts import Rollouts
from bloomery.types.errors import Corrupt, InvalidInput
from bloomery.types.resources import EngineState, ReplicaState, Status, TrafficState
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL, Record

ROUNDED = 1e-6
"""Nats: another bit, and far below what bars can tell from rounding."""
BIASED = 0.5
BEHIND_GRADIENTS = 3
"""The next operation of a run that has its first snapshot, and the gradients of a step."""


@pytest.fixture
def told_otherwise(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """From now on every log-probability comes so many nats lower than it was served."""
    read = sampling.read_answer

    def by(nats: float) -> None:
        def changed(body: bytes) -> SampleAnswer:
            answer = read(body)
            lower = [each._replace(logprobs=tuple(logprob - nats for logprob in each.logprobs)) for each in answer.sequences]
            return answer._replace(sequences=tuple(lower))

        monkeypatch.setattr(sampling, "read_answer", changed)

    return by


def synchronous(client: Client, path: Path, agreement: Held) -> list[StepReport]:
    reports: list[StepReport] = []
    config = GrpoConfig(policy=replace(POLICY, agreement=agreement), rollouts=SMALL, groups_per_step=2)
    grpo.train(client, PROBLEMS, Record().grade, config, path, steps=1, on_step=reports.append)
    return reports


def asynchronous(client: Client, path: Path, agreement: Held) -> list[StepReport]:
    reports: list[StepReport] = []
    policy = replace(POLICY, agreement=agreement)
    config = AsyncGrpoConfig(policy=policy, rollouts=SMALL, groups_per_step=2, max_head_offpolicy_versions=0, concurrency=2)
    async_grpo.train(client, PROBLEMS, Record().grade, config, path, steps=1, on_step=reports.append)
    return reports


Loop = Callable[[Client, Path, Held], list[StepReport]]


@pytest.mark.slow
@pytest.mark.parametrize("loop", [synchronous, asynchronous])
def test_both_loops_refuse_another_bit_where_bits_are_promised_and_go_on_when_it_is_gone(
    client: Client, tmp_path: Path, told_otherwise: Callable[[float], None], loop: Loop
) -> None:
    told_otherwise(ROUNDED)
    with pytest.raises(Corrupt, match=r"version `[0-9a-f]+` gives other log-probabilities than were served") as held:
        loop(client, tmp_path / "cursor", "promised")
    assert re.match(r"the rollouts of group [01] are held and nothing of it is learnt, because the server promises rollouts with", held.value.message)
    assert held.value.message.endswith('go on all the same: the same cursor with `agreement="off"` in the PolicyConfig')
    told_otherwise(0.0)
    (report,) = loop(client, tmp_path / "cursor", "promised")
    assert report.metrics["ratio/largest_difference"] == 0
    assert report.metrics["agreement/held_share"] == 1
    # All of them by the trainer, one rollout of each group by the server.
    assert report.metrics["agreement/trainer_tokens"] == report.metrics["tokens/sampled"]
    assert 2 <= report.metrics["agreement/scored_tokens"] <= 2 * SMALL.max_tokens


@pytest.mark.parametrize("loop", [synchronous, asynchronous])
def test_a_loop_that_is_told_to_shows_the_difference_and_refuses_nothing(
    client: Client, tmp_path: Path, told_otherwise: Callable[[float], None], loop: Loop
) -> None:
    told_otherwise(BIASED)
    (report,) = loop(client, tmp_path / "cursor", "off")
    assert report.metrics["ratio/largest_difference"] == pytest.approx(BIASED, rel=1e-3)
    assert report.metrics["agreement/held_share"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
def test_what_was_refused_is_not_learnt_and_a_loop_that_is_started_again_refuses_it_again(
    client: Client, tmp_path: Path, told_otherwise: Callable[[float], None], others: int
) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, POLICY, path, "f")
    served = groups(policy, told_otherwise, sound=others)
    with pytest.raises(Corrupt, match=f"the update of step {others} is held and nothing of it is learnt"):
        policy.train([row.datum for row in served], [7], served=[row.segment for row in served])
    told_otherwise(0.0)
    with pytest.raises(Corrupt, match=f"the update of step {others} is held and nothing of it is learnt"):
        Policy.open(client, POLICY, path, "f")
    run = client.run(json.loads(path.read_text())["run_id"])
    assert (run.next_seq, run.state().step) == (BEHIND_GRADIENTS + 3 * others, others)
    # Whoever looked into it may go on all the same: what is refused does not decide which groups are made.
    assert Policy.open(client, replace(POLICY, agreement="off"), path, "f").cursor.has(7)
    assert run.state().step == others + 1


def groups(policy: Policy, told_otherwise: Callable[[float], None], *, sound: int) -> list[Weighed]:
    """A biased group of the newest weights, with so many sound ones of the weights before it: one at most, and it is trained on to have others."""
    rollouts = Rollouts(lambda: policy.sampler, Record().grade, SMALL)
    before = [rollouts.group(number, PROBLEMS[number]) for number in range(sound)]
    for group in before:
        rows = mean_over_tokens(weigh([group], by_deviation=True))
        policy.train([row.datum for row in rows], [group.number], served=[row.segment for row in rows])
    told_otherwise(BIASED)
    return mean_over_tokens(weigh([*before, rollouts.group(5, PROBLEMS[3])], by_deviation=True))


def test_a_setting_that_means_nothing_is_refused_at_once(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match='must be one of "off", "promised", "always"'):
        synchronous(client, tmp_path / "cursor", "sometimes")  # type: ignore[arg-type]
    assert not (tmp_path / "cursor").exists()


@pytest.mark.slow
def test_a_key_that_is_not_told_what_is_promised_is_held_to_bars_alone(
    live_server: LiveServer, client: Client, tmp_path: Path, told_otherwise: Callable[[float], None]
) -> None:
    key = client.keys.create("only-trains", ["train", "infer"]).key
    with Client(live_server.url, key) as trains:
        told_otherwise(ROUNDED)
        (report,) = synchronous(trains, tmp_path / "rounded", "promised")
        assert report.metrics["ratio/largest_difference"] > 0
        told_otherwise(BIASED)
        with pytest.raises(Corrupt, match=r'because `agreement="always"` holds them to bars of rounding: version .* with `agreement="off"`'):
            synchronous(trains, tmp_path / "biased", "always")
    client.keys.revoke("only-trains")


@pytest.mark.slow
def test_of_a_batch_of_several_versions_the_trainer_holds_the_newest_tokens_and_the_others_are_as_old_as_they_say(
    client: Client, tmp_path: Path, told_otherwise: Callable[[float], None]
) -> None:
    policy = Policy.open(client, POLICY, tmp_path / "cursor", "f")
    first = Rollouts(lambda: policy.sampler, Record().grade, SMALL).group(0, PROBLEMS[0])
    told_otherwise(0.0)
    rows = groups(policy, told_otherwise, sound=0)
    policy.train([row.datum for row in rows], [1])
    told_otherwise(0.0)
    newest = Rollouts(lambda: policy.sampler, Record().grade, SMALL).group(2, PROBLEMS[2])
    mixed = mean_over_tokens(weigh([first, newest], by_deviation=True))
    trained = policy.train([row.datum for row in mixed], [2], served=[row.segment for row in mixed])
    # The older ones differ by what was learnt since, which is no fault.
    assert trained["logprob_diff:max"] > 0
    assert trained["held:sum"] == sum(len(member.rollout.tokens) for member in newest.members)


def status(*sampling: dict[str, object], engine: dict[str, object]) -> Status:
    replicas = [
        ReplicaState(name=f"rollouts-{number}", serves="rollouts", base_hash="base", wanted=True, ready=True, detail=detail)
        for number, detail in enumerate(sampling)
    ]
    serving = ReplicaState(name="replica-0", serves="production", base_hash="base", wanted=True, ready=True, detail=told("other", exact=False))
    engines = [
        EngineState(base_hash="base", aliases=[BASE, "tiny"], ready=True, stands_in=False, detail=engine),
        EngineState(base_hash="other", aliases=["other"], ready=True, stands_in=False, detail=told("mine", exact=False)),
    ]
    traffic = TrafficState(mode="off", queued=0, recorded=0, dropped=0, failed=0)
    return Status(version="0", started_us=0, engines=engines, replicas=[*replicas, serving], traffic=traffic)


def told(numerics: str, *, exact: bool = True) -> dict[str, object]:
    return {"numerics": numerics, "bit_exact": exact}


@pytest.mark.parametrize(
    ("known", "promised"),
    [
        (status(engine=told("mine")), True),
        (status(told("mine"), told("mine"), engine=told("mine")), True),
        (status({"problem": "it was not reached yet"}, engine=told("mine")), True),
        (status(told("others"), engine=told("mine")), False),
        (status(engine=told("mine", exact=False)), False),
        (status(engine={"problem": "away"}), None),
        (status(told("mine"), engine={"problem": "away"}), None),
    ],
)
def test_bits_are_promised_where_all_who_sample_rollouts_have_the_numerics_of_the_trainer(known: Status, promised: bool | None) -> None:
    assert promises_bits(known, "tiny") is promised


def test_the_server_of_these_tests_promises_bits(client: Client) -> None:
    assert promises_bits(client.status(), BASE)
    assert not promises_bits(client.status(), "another")
