"""Distillation: the advantage of a token is the gradient of the distance in closed form, the student comes nearer, and a loop that dies goes on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bloomery.client import Client
from bloomery.models.load import load_decoder
from bloomery.recipes.distill import DISTANCE, DistillConfig, distance, distances, learnt, train, worth
from bloomery.recipes.failures import NothingCameBack
from bloomery.recipes.grpo import StepReport
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.recipes.segments import single
from bloomery.types.errors import InvalidInput
from tests.infer.test_sampling_distribution import logits_of
from tests.live import LiveServer
from tests.recipes.loops import BASE, POLICY, PROBLEMS, SMALL, Killed
from tests.recipes.test_holding import never_delivered
from tests.recipes.test_told import Dies, follows
from tests.services.runs_stage import datum

STEPS = 2
HELD_OUT = [problem._replace(id=f"held-{problem.id}", prompt=(*problem.prompt, 9)) for problem in PROBLEMS[:2]]


@pytest.fixture(scope="module")
def teacher(live_server: LiveServer) -> str:
    """Weights that are somewhere else than the base model."""
    with Client(live_server.url, live_server.key) as client:
        run = client.create_run(BASE, 4, seed=9)
        for _ in range(3):
            run.forward_backward([datum([100 + place for place in range(20)])])
            run.optim_step(2e-2)
        return run.save_snapshot("teacher").result().version


def asked(teacher: str, **changes: Any) -> DistillConfig:
    return replace(DistillConfig(policy=POLICY, teacher=teacher, rollouts=SMALL, evaluation=SMALL, prompts_per_step=2), **changes)


def test_the_advantages_have_the_gradient_of_the_distance_of_the_shipped_model() -> None:
    """All continuations by one token of the vocabulary, each as often as the student draws it: what is expected of sampling, without its noise."""
    path = Path(__file__).parents[2] / "bloomery" / "models" / "tiny" / "weights"
    rng = np.random.default_rng(0)
    model = load_decoder(path, dtype=torch.float32)
    logits = torch.from_numpy(logits_of(model, list(PROBLEMS[0].prompt))[-1]).double().requires_grad_()
    theirs = torch.log_softmax(logits.detach() + torch.from_numpy(rng.normal(size=logits.shape)), -1)
    ours = torch.log_softmax(logits, -1)
    exact = (ours.exp() * (ours - theirs)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = [single((1,), str(token), (token,), (float(logprob),), ("v",)) for token, logprob in enumerate(ours.detach())]
    advantages = torch.tensor([float(row.advantages[0]) for row in worth(sampled, [[float(each)] for each in theirs])], dtype=torch.float64)
    surrogate = -(ours.detach().exp() * advantages * ours).sum()
    (found,) = torch.autograd.grad(surrogate, logits)
    # Advantages are float32, some nats large, of gradients of probability times nats.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert found.abs().max() > 1e-3


def test_a_constant_beside_all_advantages_is_taken_off() -> None:
    rows = worth([single((1,), "a", (2, 3), (-1.0, -2.0), ("v", "v")), single((1,), "b", (4,), (-3.0,), ("v",))], [[-1.5, -2.0], [-1.0]])
    # The teacher has them by -0.5, 0 and 2 nats likelier, 0.5 on average.
    assert [row.advantages.tolist() for row in rows] == [[-1.0, -0.5], [1.5]]


def test_the_distance_is_an_unbiased_estimate_that_is_never_negative() -> None:
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    of = [distance([[math.log(mine)]], [[math.log(theirs)]]) for mine, theirs in zip(p, q, strict=True)]
    assert min(of) >= 0
    assert float(p @ of) == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-12)


def test_answers_of_the_teacher_are_a_mean_over_their_tokens() -> None:
    first, second = learnt([single((1, 2), "a", (3, 4), (-1.0, -1.0), ("t", "t")), single((1,), "b", (5, 6), (-1.0, -1.0), ("t", "t"))])
    assert first.inputs["weights"].numpy().tolist() == [0, 0.25, 0.25]
    assert second.inputs["target_tokens"].numpy().tolist() == [5, 6]
    assert second.inputs["weights"].numpy().tolist() == [0.25, 0.25]


@pytest.mark.parametrize("mode", ["on_policy", "teacher_answers"])
def test_a_loop_that_dies_at_its_cursor_tells_every_step_and_ends_with_the_same_weights(
    client: Client, tmp_path: Path, teacher: str, mode: str
) -> None:
    config = asked(teacher, mode=mode, evaluate_every=1)
    digests, told = [], []
    for number, write in enumerate([0, 4, 5]):
        path, reports = tmp_path / f"cursor-{number}", dict[int, StepReport]()

        def note(report: StepReport, reports: dict[int, StepReport] = reports) -> None:
            reports[report.step] = report

        if write:
            with pytest.raises(Killed):
                train(client, PROBLEMS, config, Dies(path, write, kept=write % 2 == 0), steps=STEPS, held_out=HELD_OUT, on_step=note)
        policy = train(client, PROBLEMS, config, path, steps=STEPS, held_out=HELD_OUT, on_step=note)
        digests.append(policy.run.save_checkpoint("end").result().digest)
        told.append({step: {name: value for name, value in report.metrics.items() if follows(name)} for step, report in reports.items()})
    assert len(set(digests)) == 1
    assert all(each == told[0] for each in told)
    assert {"loss", "gradient_norm", "learning_rate", "tokens/sampled", f"evaluation/{DISTANCE}"} <= told[0][STEPS].keys()
    assert (DISTANCE in told[0][1]) == (mode == "on_policy")


def test_who_answers_as_the_teacher_does_learns_nothing(client: Client, tmp_path: Path) -> None:
    reports: list[StepReport] = []
    policy = train(client, PROBLEMS, asked(BASE), tmp_path / "cursor", steps=1, on_step=reports.append)
    assert (policy.step, reports[0].metrics[DISTANCE]) == (0, 0)


@pytest.mark.parametrize("mode", ["on_policy", "teacher_answers"])
def test_a_loop_of_one_step_to_which_nobody_answers_says_so_and_makes_it_when_somebody_does(
    client: Client, tmp_path: Path, teacher: str, mode: str
) -> None:
    config = asked(teacher, mode=mode)
    hurried = replace(config, rollouts=replace(config.rollouts, sample_timeout_s=1e-9))
    for _ in range(2):
        with pytest.raises(NothingCameBack, match=r"a round left nothing to train on.*`sampling`.*nothing was learnt"):
            train(client, PROBLEMS, hurried, tmp_path / "cursor", steps=1)
    assert train(client, PROBLEMS, config, tmp_path / "cursor", steps=1).step == 1


@pytest.mark.slow
def test_a_student_whose_newer_weights_do_not_arrive_learns_nothing_of_what_older_ones_say(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: str
) -> None:
    path = tmp_path / "cursor"
    with monkeypatch.context() as patch:
        never_delivered(patch, client, but=teacher)
        with pytest.raises(NothingCameBack, match=r"3 rounds in a row .* `foreign_version` \(tokens of weights that were out of date"):
            train(client, PROBLEMS, asked(teacher), path, steps=9)
    assert train(client, PROBLEMS, asked(teacher), path, steps=5).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_policy", "teacher_answers"])
def test_the_student_comes_nearer_to_its_teacher(client: Client, tmp_path: Path, teacher: str, mode: str) -> None:
    rollouts = RolloutConfig(group_size=8, max_tokens=16, seed=1)
    config = asked(teacher, mode=mode, rollouts=rollouts, prompts_per_step=5, policy=replace(POLICY, rank=16, learning_rate=4e-3))
    policy = train(client, PROBLEMS, config, tmp_path / "cursor", steps=10)
    before, after = (distances(student, client.sampler(teacher), HELD_OUT, rollouts) for student in (policy.first, policy.sampler))
    assert sum(after) < 0.5 * sum(before), (before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mode": "both"}, "mode"),
        ({"mode": "teacher_answers", "policy": replace(POLICY, loss="ppo")}, "loss"),
        ({"prompts_per_step": 0}, "prompts_per_step"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"evaluate_every": 1}, "held_out"),
        ({"rollouts": replace(SMALL, attempts=0)}, "attempts"),
        ({"rollouts": replace(SMALL, piece_tokens=0)}, "piece_tokens"),
        ({"rollouts": replace(SMALL, reuse=True), "prompts_per_step": 6}, "prompts_per_step"),
        ({"evaluation": replace(SMALL, group_size=0)}, "group_size"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_at_once(client: Client, tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        train(client, PROBLEMS, asked(BASE, **changes), tmp_path / "cursor", steps=1)
    assert refused.value.field == field
