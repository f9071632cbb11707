"""Every method as a job on a real server: it learns what its rows teach, and is compared with what it began with."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.recipes.pairs import SYSTEM, WORDS
from bloomery.types.errors import InvalidInput, NotFound
from bloomery.types.graders import OutputRow
from bloomery.types.jobs import Begin, Data, Evaluation, Job, JobSpec, JobState, Watch
from bloomery.types.methods import Batches, DirectPreference, Distillation, EarlyStopping, OddsRatioPreference, Optimizer, Reinforcement, Supervised
from bloomery.types.rollouts import RolloutGroup
from tests.jobs.test_jobs_live import answered_as_they_are_served
from tests.live import LiveServer

BASE = "bloomery-tiny"
GRADER = """
import json

def score(output, item):
    try:
        answer = json.loads(output)
    except ValueError:
        return {"score": 0.0, "reason": "no JSON", "metrics": {"json": 0.0}}
    right = sum(answer.get(key) == value for key, value in item["pairs"].items()) if isinstance(answer, dict) else 0
    return {"score": right / len(item["pairs"]), "metrics": {"json": 1.0}}
"""


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    random = Random(seed)
    return [dict(zip(words[::2], words[1::2], strict=True)) for words in (random.sample(WORDS, 4) for _ in range(count))]


def asked(given: dict[str, str]) -> list[dict[str, str]]:
    said = ", ".join(f"{key} is {value}" for key, value in given.items())
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]


def answer(given: dict[str, str]) -> dict[str, str]:
    return {"role": "assistant", "content": json.dumps(given)}


def lines(rows: list[Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def chat(given: dict[str, str]) -> dict[str, Any]:
    return {"messages": [*asked(given), answer(given)]}


def preference(given: dict[str, str]) -> dict[str, Any]:
    """Right, rather than with the words the other way round."""
    backwards = {value: key for key, value in given.items()}
    return {"input": {"messages": asked(given)}, "preferred_output": [answer(given)], "non_preferred_output": [answer(backwards)]}


def prompt(given: dict[str, str]) -> dict[str, Any]:
    return {"messages": asked(given), "pairs": given}


HELD_OUT = pairs(8, 2)


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        for name, of in (("chats", chat), ("preferences", preference), ("prompts", prompt)):
            client.datasets.create(name)
            client.datasets.add_version(name, {"train": lines([of(each) for each in pairs(64, 1)]), "eval": lines([of(each) for each in HELD_OUT])})
        client.graders.create("pairs-right", {"type": "function", "source": GRADER, "entry": "score"})
        yield client


@pytest.fixture(scope="module")
def warm(client: Client) -> Job:
    """What the others begin with: it has seen the task."""
    method = Supervised(optimizer=Optimizer(learning_rate=4e-3), batches=Batches(epochs=1, rows=8))
    return done(client, JobSpec(name="warm", base_model=BASE, data=Data(dataset="chats"), method=method, seed=1))


def rewarded_as_its_grader_does(client: Client, job: Job) -> None:
    """The samples of a job of reinforcement have the rewards of their answers, and come of the draws that were measured."""
    assert job.result is not None
    assert job.result.samples
    (reward,) = job.result.compared
    for sample in job.result.samples:
        row = HELD_OUT[sample.row]
        assert (sample.asked, sample.reference) == (asked(row)[-1]["content"], None)
        said = [OutputRow(item={"pairs": row}, output=output, messages=asked(row)) for output in (sample.before, sample.after)]
        assert [each.score for each in client.graders.run("pairs-right", said).results] == [sample.before_reward, sample.after_reward]
    changed = [each.before_reward != each.after_reward for each in job.result.samples]
    assert changed == sorted(changed, reverse=True)
    assert len(job.result.samples) == reward.rows


def kept_and_served(client: Client, job: Job) -> int:
    """How many steps before the last a job kept: each can be resumed and deployed, and is told by its events with the version."""
    assert job.result is not None
    of_kinds: dict[str, dict[str, str | None]] = {"named": {}, "snapshot": {}}
    for each in client.run(job.result.run).checkpoints():
        if (each.name or "").startswith("step-"):
            of_kinds[each.kind][each.name or ""] = each.version
    kept = [event for event in client.jobs.events(job.id) if event.message.startswith("kept step ")]
    told = {f"step-{event.data['step']}": event.data["version"] for event in kept}
    assert [event.message for event in kept] == [f"kept step {name.removeprefix('step-')} as version {version}" for name, version in told.items()]
    assert of_kinds["snapshot"] == told
    assert of_kinds["named"].keys() == told.keys()
    for name, version in told.items():
        assert client.deployments.create(f"{job.spec.name}-{name}", version).live.version == version
    return len(told)


def agrees_with_its_points(client: Client, job: Job) -> list[RolloutGroup]:
    """What was recorded of every step is what its points say, token by token as the versions that it names have it; the groups of the first step."""
    assert job.result is not None
    run, points = client.run(job.result.run), client.jobs.points(job.id)
    steps = run.rollouts.steps(order="oldest")
    assert [step.step for step in steps] == [point.step for point in points]
    for step, point in zip(steps, points, strict=True):
        if step.reward_mean is not None:
            assert step.reward_mean == pytest.approx(point.values["reward/raw"])
        assert step.tokens == point.values["tokens/sampled"]
    groups = list(run.rollouts.groups(1))
    for group in groups:
        assert group.messages == asked(pairs(64, 1)[int(group.problem.removeprefix("train-")) - 1])
        segment = group.rollouts[0].segments[0]
        assert "".join(segment.texts or []) == segment.text
        ((start, stop, version),) = segment.versions
        assert (start, stop) == (0, len(segment.tokens))
        again = client.sampler(version).score([*group.prompt_tokens, *segment.tokens]).prompt_logprobs(60)
        assert segment.logprobs == list(again[len(group.prompt_tokens) :])
    return groups


def done(client: Client, spec: JobSpec) -> Job:
    job = client.jobs.wait(client.jobs.create(spec).id, 300)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.result is not None
    return job


def after_warm(client: Client, name: str, dataset: str, method: Any, **changes: Any) -> Job:
    known: dict[str, Any] = {"base_model": BASE, "data": Data(dataset=dataset), "begin": Begin(job="warm"), "seed": 1}
    return done(client, JobSpec(name=name, method=method, **known | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        DirectPreference(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=1, rows=8)),
        OddsRatioPreference(optimizer=Optimizer(learning_rate=1e-3), batches=Batches(epochs=1, rows=8)),
    ],
    ids=["dpo", "orpo"],
)
def test_preferences_make_the_preferred_answer_likelier(client: Client, warm: Job, method: Any) -> None:
    job = after_warm(client, f"prefers-{method.kind}", "preferences", method, evaluation=Evaluation(every=4, served_every=4))
    assert job.result is not None
    measures = {each.name: each for each in job.result.compared}
    assert measures["margin"].difference_interval[0] > 0
    assert measures["prefers"].rows == 8
    samples = answered_as_they_are_served(client, job, [asked(each) for each in HELD_OUT], 128)
    said = [(each.row, each.reference, each.rejected) for each in sorted(samples, key=lambda each: each.row)]
    both = [(preference(each)["preferred_output"][0]["content"], preference(each)["non_preferred_output"][0]["content"]) for each in HELD_OUT]
    assert said == [(row, *sides) for row, sides in enumerate(both)]
    points = client.jobs.points(job.id)
    assert [point.step for point in points] == list(range(1, 9))
    assert all({"loss", "margin", "accuracy", "gradient_norm"} <= point.values.keys() for point in points)
    assert {"evaluation/loss", "evaluation/accuracy"} <= points[3].values.keys()
    assert [point.step for point in points if {"served/prefers", "served/margin"} <= point.values.keys()] == [4]
    if method.kind == "dpo":
        # At the reference every margin is zero, whatever the rows.
        assert points[0].values["margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_all_parameters_are_trained_compared_kept_and_served(client: Client) -> None:
    method = Supervised(optimizer=Optimizer(learning_rate=5e-4), batches=Batches(epochs=1, rows=8))
    spec = JobSpec(name="whole", base_model=BASE, data=Data(dataset="chats"), method=method, rank=0, seed=1, checkpoint_every=4)
    job = done(client, spec)
    assert job.result is not None
    loss = job.result.compared[0]
    assert loss.difference_interval is not None
    assert loss.difference_interval[1] < 0
    assert job.result.fidelity is not None
    assert job.result.fidelity.verdict == "pass"
    assert client.versions.card(job.result.version).kind == "full"
    assert kept_and_served(client, job) == 1
    said = client.chat(job.result.version, asked(pairs(1, 1)[0]), max_tokens=4)
    assert said["system_fingerprint"] == job.result.version


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_reinforcement_raises_the_reward_of_the_grader(client: Client, warm: Job, asynchronous: bool) -> None:
    method = Reinforcement(grader="pairs-right", steps=12, groups_per_step=4, group_size=8, max_tokens=40, asynchronous=asynchronous)
    job = after_warm(client, f"rewards-{asynchronous}", "prompts", method, evaluation=Evaluation(every=6, served_every=6), checkpoint_every=2)
    assert job.result is not None
    assert kept_and_served(client, job) >= 1
    groups = agrees_with_its_points(client, job)
    assert {each.reason for group in groups for each in group.rollouts} <= {None, "no JSON"}
    assert all(each.reason == "no JSON" for group in groups for each in group.rollouts if each.parts == {"json": 0.0})
    assert all((group.dropped is None) == (len({each.reward for each in group.rollouts}) > 1) == group.trained for group in groups)
    (reward,) = job.result.compared
    assert (reward.name, reward.rows) == ("reward", 8)
    assert reward.after > reward.before
    rewarded_as_its_grader_does(client, job)
    points = client.jobs.points(job.id)
    assert [point.step for point in points] == list(range(1, 13))
    assert all({"reward/raw", "reward/part/json", "tokens/sampled"} <= point.values.keys() for point in points)
    # A step whose groups were all rewarded alike trains nothing.
    ratios = [point.values["ratio/k3"] for point in points if "ratio/k3" in point.values]
    assert len(ratios) >= 6
    assert [point.step for point in points if "evaluation/reward" in point.values] == [6, 12]
    # The same weights, prompts and seeds; behind the last step they are compared.
    assert [point.values["served/reward"] for point in points if "served/reward" in point.values] == [points[5].values["evaluation/reward"]]
    if not asynchronous:
        assert ratios == [0.0] * len(ratios)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (Reinforcement(grader="pairs-right", steps=9, groups_per_step=4, group_size=8, max_tokens=40), "the held-out reward rose no more"),
        (Distillation(teacher="warm", steps=9, prompts_per_step=2, samples=2, max_tokens=16), "the distance to the teacher fell no more"),
    ],
    ids=["rft", "distill"],
)
def test_a_job_whose_held_out_prompts_come_no_better_ends_early(client: Client, warm: Job, method: Any, why: str) -> None:
    assert warm.result is not None
    changes: dict[str, Any] = {"early_stopping": EarlyStopping(patience=2, min_delta=100.0)}
    if isinstance(method, Distillation):
        changes["teacher"] = warm.result.version
    begin = Begin(job="warm") if isinstance(method, Reinforcement) else None
    stopping = method.model_copy(update=changes)
    job = after_warm(client, f"early-{method.kind}", "prompts", stopping, begin=begin, evaluation=Evaluation(every=1, rows=2))
    assert (job.state, job.progress.step, job.progress.steps) == (JobState.SUCCEEDED, 3, 9)
    assert f"ended early at step 3: {why}" in [event.message for event in client.jobs.events(job.id)]


@pytest.mark.slow
def test_a_reward_that_is_had_without_what_it_stands_for_is_seen_by_a_grader_that_nothing_is_trained_on(client: Client, warm: Job) -> None:
    client.graders.create("long", {"type": "function", "source": "def score(output):\n    return len(output) / 100\n", "entry": "score"})
    client.graders.waive("long", "planted to be exploited")
    method = Reinforcement(grader="long", held_out_grader="pairs-right", learning_rate=2e-3, steps=24, groups_per_step=4, group_size=8, max_tokens=40)
    method = method.model_copy(update={"held_out_share": 1.0})
    job = after_warm(client, "hollow", "prompts", method, watch=Watch(action="warn"))
    assert job.result is not None
    assert any(event.message.startswith("over optimisation at step") for event in client.jobs.events("hollow"))
    points = client.jobs.points(job.id)
    assert all("reward/held_out" in point.values for point in points)
    reward, unseen = job.result.compared
    assert (reward.name, unseen.name) == ("reward", "held_out_reward")
    assert reward.difference_interval is not None
    assert unseen.difference_interval is not None
    assert reward.difference_interval[0] > 0 > unseen.difference_interval[1]


@pytest.mark.slow
def test_a_held_out_grader_that_fails_takes_no_reward_away_and_is_named(client: Client, warm: Job) -> None:
    client.graders.create("fails", {"type": "function", "source": "def score(output):\n    raise ValueError('no view')\n", "entry": "score"})
    method = Reinforcement(grader="pairs-right", held_out_grader="fails", steps=1, groups_per_step=2, group_size=4, max_tokens=40)
    job = after_warm(client, "unseen", "prompts", method.model_copy(update={"held_out_share": 1.0}), evaluation=Evaluation(rows=2))
    assert job.result is not None
    assert [each.name for each in job.result.compared] == ["reward"]
    assert "reward/held_out" not in client.jobs.points(job.id)[0].values
    told = [event.message for event in client.jobs.events("unseen")]
    assert any(message.startswith("the held-out grader: ") and "no view" in message for message in told)
    assert any(message.startswith("the held-out grader is undecided to attacks: ") and "no view" in message for message in told)
    assert not any("sees nothing" in message for message in told)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_policy", "teacher_answers"])
def test_a_student_comes_nearer_to_the_teacher_that_a_deployment_served_when_the_job_was_made(client: Client, warm: Job, mode: str) -> None:
    assert warm.result is not None
    client.deployments.create(f"teacher-{mode}", warm.result.version)
    method = Distillation(teacher=f"teacher-{mode}", mode=mode, steps=12, samples=8, max_tokens=24)  # type: ignore[arg-type]
    spec = JobSpec(
        name=f"distils-{mode}",
        base_model=BASE,
        data=Data(dataset="prompts"),
        method=method,
        evaluation=Evaluation(every=6, served_every=6),
        seed=1,
        checkpoint_every=6,
    )
    job = client.jobs.create(spec)
    assert job.spec.method.teacher_version == warm.result.version  # type: ignore[union-attr]
    # A deployment may move on meanwhile.
    client.deployments.promote(f"teacher-{mode}", BASE)
    ended = client.jobs.wait(job.id, 300)
    assert ended.result is not None, ended.reason
    assert kept_and_served(client, ended) == 1
    (distance,) = ended.result.compared
    assert (distance.name, distance.rows, distance.higher_is_better) == ("kl/teacher", 8, False)
    assert distance.difference_interval is not None
    assert distance.difference_interval[1] < 0
    assert distance.after < 0.7 * distance.before
    samples = answered_as_they_are_served(client, ended, [asked(each) for each in HELD_OUT], 24)
    assert sorted(each.row for each in samples) == list(range(8))
    assert {(each.reference, each.before_reward, each.after_reward) for each in samples} == {(None, None, None)}
    points = client.jobs.points(job.id)
    assert [point.step for point in points if "evaluation/kl/teacher" in point.values] == [6, 12]
    assert [point.values["served/kl/teacher"] for point in points if "served/kl/teacher" in point.values] == [
        points[5].values["evaluation/kl/teacher"]
    ]
    assert all({"loss", "gradient_norm", "learning_rate"} <= point.values.keys() for point in points)
    if mode == "on_policy":
        groups = agrees_with_its_points(client, ended)
        assert all(each.reward is None and each.advantage is not None for group in groups for each in group.rollouts)
        assert points[-1].values["kl/teacher"] < 0.7 * points[0].values["kl/teacher"]  # type: ignore[operator]


@pytest.mark.slow
def test_a_grader_that_raises_is_no_zero(client: Client, warm: Job) -> None:
    client.graders.create("raises", {"type": "function", "source": "def score(output):\n    raise ValueError('no idea')\n", "entry": "score"})
    method = Reinforcement(grader="raises", steps=2, groups_per_step=2, group_size=2, max_tokens=8)
    job = client.jobs.create(JobSpec(name="raises", base_model=BASE, data=Data(dataset="prompts"), method=method, seed=1))
    for _ in range(2):
        stands = client.jobs.wait(job.id, 300)
        assert (stands.state, stands.progress.step) == (JobState.PAUSED, 0)
        assert "none came to a reward: raised (" in str(stands.reason)
        assert "no idea" in str(stands.reason)
        client.jobs.resume(job.id)
    client.jobs.cancel(job.id)


@pytest.mark.slow
def test_a_grader_that_is_away_pauses_a_job_before_its_steps_are_spent(client: Client, warm: Job) -> None:
    source = "def score(output):\n    raise ValueError('the judge is away')\n"
    client.graders.create("away", {"type": "function", "source": source, "entry": "score"})
    method = Reinforcement(grader="away", steps=30, groups_per_step=1, group_size=2, max_tokens=8)
    # What begins where another ended is not probed before its first step.
    begin = Begin(job=warm.id)
    job = client.jobs.create(JobSpec(name="away", base_model=BASE, data=Data(dataset="prompts"), method=method, begin=begin, seed=1))
    for done in (3, 6):
        stands = client.jobs.wait(job.id, 300)
        assert (stands.state, stands.progress.step) == (JobState.PAUSED, done)
        assert "3 rounds in a row left nothing to train on" in str(stands.reason)
        assert "the judge is away" in str(stands.reason)
        client.jobs.resume(job.id)
    client.jobs.cancel(job.id)


@pytest.mark.parametrize(
    ("dataset", "method", "said"),
    [
        ("prompts", Supervised(), "rows of `prompt`, and `sft` takes `chat` or `completion`"),
        ("chats", DirectPreference(), "rows of `chat`, and `dpo` takes `preference`"),
        ("preferences", Reinforcement(grader="pairs-right"), "rows of `preference`, and `rft` takes `prompt`"),
    ],
    ids=["sft", "dpo", "rft"],
)
def test_rows_of_another_kind_are_refused_at_once(client: Client, dataset: str, method: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        client.jobs.create(JobSpec(name="wrong-kind", base_model=BASE, data=Data(dataset=dataset), method=method))
    assert refused.value.field == "data.dataset"


def test_graders_and_teachers_that_are_not_there_and_answers_without_room_are_refused_at_once(client: Client) -> None:
    for method, kind, field in (
        (Reinforcement(grader="nobody"), NotFound, "method.grader"),
        (Reinforcement(grader="pairs-right", grader_version=9), NotFound, "method.grader"),
        (Reinforcement(grader="pairs-right", held_out_grader="nobody"), NotFound, "method.held_out_grader"),
        (Reinforcement(grader="pairs-right", held_out_grader="pairs-right"), InvalidInput, "method.held_out_grader"),
        (Reinforcement(grader="pairs-right", max_tokens=1 << 20), InvalidInput, "method.max_tokens"),
        (Distillation(teacher="nobody"), NotFound, "method.teacher"),
        (Distillation(teacher="tinker://no/path"), InvalidInput, "method.teacher"),
        (Distillation(teacher=BASE, max_tokens=1 << 20), InvalidInput, "method.max_tokens"),
    ):
        with pytest.raises(kind) as refused:
            client.jobs.create(JobSpec(name="refused", base_model=BASE, data=Data(dataset="prompts"), method=method))
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": Supervised(early_stopping=EarlyStopping(patience=1))}, "method.early_stopping"),
        ({"method": Reinforcement(grader="pairs-right", early_stopping=EarlyStopping(patience=1))}, "method.early_stopping"),
        ({"method": Distillation(teacher=BASE, early_stopping=EarlyStopping(patience=1))}, "method.early_stopping"),
        ({"evaluation": Evaluation(every=2, split="validation")}, "evaluation.every"),
        ({"evaluation": Evaluation(served_every=2, split="validation")}, "evaluation.served_every"),
        ({"evaluation": Evaluation(served_every=2, answers=0)}, "evaluation.answers"),
    ],
    ids=["early stopping", "of reinforcement", "of distillation", "evaluation", "served", "answers"],
)
def test_what_would_be_ignored_is_refused(client: Client, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        client.jobs.create(JobSpec(name="ignored", base_model=BASE, data=Data(dataset="prompts"), **changes))
    assert refused.value.field == field
