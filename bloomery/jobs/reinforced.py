"""Reinforcement as a job: prompts of a data set, a grader of the server, and the loops of `recipes/grpo` and `recipes/async_grpo`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from bloomery.client import Client, Sampler
from bloomery.jobs.comparison import Both, paired
from bloomery.jobs.looping import JobCursor, Looped, looped, policy_config
from bloomery.jobs.reporting import StandsStill
from bloomery.jobs.rows import problems, rows_of
from bloomery.jobs.work import Work
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.evaluation import EvaluationConfig, evaluate
from bloomery.recipes.grpo import GrpoConfig, OnStep
from bloomery.recipes.policy import Policy
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Grade, Problem, Rollout, RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.datasets import PromptRow
from bloomery.types.errors import BloomeryError, InvalidInput, Unavailable, WorkerError
from bloomery.types.graders import OutputRow
from bloomery.types.jobs import Clip, Compared, JobResult, JobSpec, Reinforcement

_SAMPLES: Final = 4
"""Answers of each held-out prompt, by both models."""
_PROBED: Final = 16
"""Prompts whose answers show whether a grader tells any apart."""
HELD_OUT: Final = "reward/held_out"
"""What the held-out grader says, among the parts of rewards, whose names graders give, and on the training axis."""
_LOSSES: Final = {"grpo": "ppo", "dapo": "dapo", "gspo": "gspo"}
"""By the server's names: GRPO is its clipped ratio, with advantages of the group."""


def train(work: Work) -> JobResult:
    """Train, publish, compare. Begun again after any death, it goes on with the same groups."""
    spec, wanted, method = work.spec, work.spec.evaluation, work.spec.method
    assert isinstance(method, Reinforcement)
    given = problems(rows_of(work.client, spec, spec.data.train), work.tokenizer, spec.room, spec.data.train)
    held_out = _different(problems(rows_of(work.client, spec, wanted.split, wanted.rows), work.tokenizer, spec.room, wanted.split))
    work.reporter.note(f"{len(given)} prompts to train on, {len(held_out)} held out", key="rows")
    grade = grade_by(work.client, method, work.tokenizer)
    if work.cursor is None:
        require_trust(work, method, given, grade)
    unseen = held_out_by(work, method)
    rewarded = grade if unseen is None else beside(grade, unseen, method.held_out_share, _noted(work))
    loop = _loop(work, method, given, held_out, rewarded)
    both = Both(work.client.sampler(loop.first), work.client.sampler(loop.published.version))
    compared = compare_rewards(work, both, held_out, grade)
    if unseen is not None:
        compared += compare_rewards(work, both, held_out, unseen, "held_out_reward")
    return loop.published.result(compared, loop.first)


def require_trust(work: Work, method: Reinforcement, given: Sequence[Problem], grade: Grade) -> None:
    """Before anything is spent: the grader is attacked on the job's prompts, unless the server knows what comes of it. The job stands still where it
    pays without competence, or for everything alike; until it is waived, or another job has a version that is mended."""
    data = work.spec.data
    work.reporter.note("asks whether its grader pays without competence; where nobody knows, it is attacked now", key="attacking")
    found = work.client.graders.attack(
        method.grader, version=method.grader_version, dataset=data.dataset, dataset_version=data.version, split=data.train
    )
    work.reporter.note(
        f"the grader is {found.verdict} to attacks: {found.why}",
        level="info" if found.verdict == "sound" else "warning",
        key="attack",
        attack=found.id,
    )
    if found.waiver is not None:
        waived = f"attacks of the grader count for nothing: waived by {found.waiver.by}, {found.waiver.reason}"
        return work.reporter.note(waived, level="warning", key="waiver", **found.waiver.model_dump())
    if found.blocks is not None:
        raise StandsStill(f"{found.blocks}; {_then(work)}")
    if not found.varied and work.spec.begin is None:
        _require_varied(work, method, given, grade)


def _require_varied(work: Work, method: Reinforcement, given: Sequence[Problem], grade: Grade) -> None:
    """A grader that gave every attack the same may know right answers that no attack does, so it is tried on the model's own."""
    config = EvaluationConfig(samples=_SAMPLES, max_tokens=method.max_tokens)
    probe = evaluate(work.client.sampler(work.spec.base_model), _different(given)[:_PROBED], grade, config)
    rewards = [reward for answer in probe.answers for reward in answer.rewards]
    if len(set(rewards)) == 1:
        alike = f"it gives {rewards[0]:g} to every attack and to {len(rewards)} answers of `{work.spec.base_model}`"
        accept = f"`bloomery grader waive {method.grader} --version {method.grader_version} --reason WHY`"
        problem = f"grader `{method.grader}` version {method.grader_version} teaches nothing: {alike}"
        raise StandsStill(f"{problem}; mend it in a new version, or accept it ({accept}); {_then(work)}")


def _then(work: Work) -> str:
    return f"what is accepted goes on by `bloomery job resume {work.spec.name}`, a mended version wants a new job"


def _loop(work: Work, method: Reinforcement, given: Sequence[Problem], held_out: Sequence[Problem], grade: Grade) -> Looped:
    every = work.spec.evaluation.every
    config = replace(grpo_config(work.spec, work.run_options, work.request), evaluate_every=every)
    looked_at = held_out if every else ()

    def go_on(cursor: JobCursor, stepped: OnStep) -> Policy:
        if isinstance(config, async_grpo.AsyncGrpoConfig):
            policy = async_grpo.train(work.client, given, grade, config, cursor, steps=method.steps, held_out=looked_at, on_step=stepped)
        else:
            policy = grpo.train(work.client, given, grade, config, cursor, steps=method.steps, held_out=looked_at, on_step=stepped)
        if not policy.step:
            name = work.spec.name
            why = (
                f"no group of answers had different rewards (`bloomery job points {name}` has them), or none could be graded "
                f"(`bloomery job events {name}` says what failed): begin where some answers of a group are better than others, or grade more finely"
            )
            raise InvalidInput(f"nothing was learnt in {method.steps} steps: {why}", field="method.grader")
        return policy

    def look(sampler: Sampler) -> dict[str, float]:
        measured = grpo.measure(sampler, held_out, grade, config.evaluation, concurrency=config.concurrency)
        return {"reward": measured.mean} if measured.means else {}

    return looped(work, method.steps, go_on, look, named)


def grade_by(client: Client, method: Reinforcement, tokenizer: ChatTokenizer) -> Grade:
    """The job's grader, over the server; a result without a score is a failure of its kind and never a zero."""
    return _graded_by(client, method.grader, method.grader_version, tokenizer)


def held_out_by(work: Work, method: Reinforcement) -> Grade | None:
    """The grader that nothing is trained on, where the job has one."""
    if method.held_out_grader is None:
        return None
    return _graded_by(work.client, method.held_out_grader, method.held_out_grader_version, work.tokenizer)


def beside(grade: Grade, held_out: Grade, share: float, note: Callable[[str], None]) -> Grade:
    """The same rewards, and of a share of the answers what another grader says, as a part that is shown. Where that one fails, nothing is shown."""

    def both(rollout: Rollout) -> Reward:
        reward = grade(rollout)
        assert isinstance(reward, Reward)
        if not _chosen(rollout, share):
            return reward
        try:
            other = held_out(rollout)
        except BloomeryError as error:
            note(error.message)
            return reward
        assert isinstance(other, Reward)
        return replace(reward, parts={**reward.parts, HELD_OUT: other.value})

    return both


def _noted(work: Work) -> Callable[[str], None]:
    return lambda why: work.reporter.note(f"the held-out grader: {why}", level="warning", key=f"held out {why}")


def _chosen(rollout: Rollout, share: float) -> bool:
    """By what was said and not by chance: the same answer is looked at whenever a process begins again."""
    drawn = hashlib.sha256(repr((rollout.problem.id, rollout.tokens)).encode()).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2.0**64


def _graded_by(client: Client, grader: str, version: int | None, tokenizer: ChatTokenizer) -> Grade:
    def grade(rollout: Rollout) -> Reward:
        row: PromptRow = rollout.problem.data
        said = rollout.tokens[:-1] if rollout.stopped else rollout.tokens
        output = OutputRow(item=row.item, output=tokenizer.decode(said), messages=row.messages)
        (result,) = client.graders.run(grader, [output], version=version).results
        if result.error is not None:
            kind = Unavailable if result.error.kind == "unavailable" else WorkerError
            raise kind(f"{result.error.kind}: {result.error.detail}")
        assert result.score is not None
        return Reward(rollout.id, result.score, result.metrics)

    return grade


def compare_rewards(work: Work, both: Both, held_out: Sequence[Problem], grade: Grade, name: str = "reward") -> list[Compared]:
    """The mean reward of held-out prompts, on the same draws."""
    method = work.spec.method
    assert isinstance(method, Reinforcement)
    if not held_out:
        return []
    config = EvaluationConfig(samples=_SAMPLES, max_tokens=method.max_tokens)
    before = evaluate(both.before, held_out, grade, config)
    after = evaluate(both.after, held_out, grade, config, earlier=before)
    rewards = [
        (fmean(old.rewards), fmean(new.rewards)) for old, new in zip(before.answers, after.answers, strict=True) if old.rewards and new.rewards
    ]
    if lost := len(held_out) - len(rewards):
        work.reporter.note(f"{lost} held-out prompts have no {name}, and are left out", level="warning", key=f"lost {name}")
    if not rewards:
        return []
    return [paired(name, [old for old, _ in rewards], [new for _, new in rewards], higher_is_better=True)]


def grpo_config(spec: JobSpec, run_options: dict[str, object], request: str) -> GrpoConfig | async_grpo.AsyncGrpoConfig:
    """The recipe's settings of a resolved spec."""
    method = spec.method
    assert isinstance(method, Reinforcement)
    assert spec.seed is not None
    policy = replace(
        policy_config(spec, method.optimizer, method.steps, run_options, request), loss=_LOSSES[method.loss], loss_config=_thresholds(method.clip)
    )
    rollouts = RolloutConfig(group_size=method.group_size, max_tokens=method.max_tokens, seed=spec.seed)
    if method.held_out_grader is not None:
        # Two graders have the time of two.
        rollouts = replace(rollouts, grade_timeout_s=2 * rollouts.grade_timeout_s)
    common: dict[str, Any] = {
        "policy": policy,
        "rollouts": rollouts,
        "evaluation": RolloutConfig(group_size=_SAMPLES, max_tokens=method.max_tokens),
        "groups_per_step": method.groups_per_step,
        "checkpoint_every": spec.checkpoint_every,
        "by_deviation": method.by_deviation,
        "kl_coefficient": method.kl_coefficient,
    }
    if not method.asynchronous:
        return GrpoConfig(**common)
    return async_grpo.AsyncGrpoConfig(**common, max_head_offpolicy_versions=method.max_staleness)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """As the axis of training has them: what the held-out grader said stands beside the reward and not among its parts."""
    return {name.replace(f"reward/part/{HELD_OUT}", HELD_OUT): value for name, value in metrics.items()}


def _different(given: Sequence[Problem]) -> list[Problem]:
    """One of those with the same prompt: they would get the same answers."""
    return list({problem.prompt: problem for problem in given}.values())


def _thresholds(clip: Clip) -> tuple[tuple[str, float], ...]:
    given = {"clip_low_threshold": clip.low, "clip_high_threshold": clip.high}
    return tuple((name, value) for name, value in given.items() if value is not None)
