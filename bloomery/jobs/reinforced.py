"""Reinforcement as a job: prompts of a data set, a grader of the server or an agent elsewhere, and the loops `recipes/grpo` and `async_grpo`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

from bloomery.client import Sampler
from bloomery.jobs.comparison import Both, paired, said
from bloomery.jobs.looping import JobCursor, Looped, looped, policy_config, recorder_of, stopping_config
from bloomery.jobs.reporting import StandsStill
from bloomery.jobs.rewarding import HELD_OUT, beside, conversation, rewarding, scores_by
from bloomery.jobs.rows import Words, problems, prompt_words, rows_of
from bloomery.jobs.samples import Answered, Reply, telling
from bloomery.jobs.work import Work
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.environments import groups_by
from bloomery.recipes.failures import reasons
from bloomery.recipes.grpo import GrpoConfig, OnStep, groups_of
from bloomery.recipes.policy import Policy
from bloomery.recipes.rollouts import Environment, Grade, Group, Problem, Rollout, RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from bloomery.types.graders import GraderAttack
from bloomery.types.jobs import Compared, JobResult, JobSpec
from bloomery.types.methods import Clip, Reinforcement
from bloomery.types.resources import RunOptions

Opened = Callable[[], AbstractContextManager[Grade | Environment]]
"""Rewards by the grader that is trained on, within a `with`."""
_SAMPLES: Final = 4
"""Answers of each held-out prompt, by both models."""
_PROBED: Final = 16
"""Prompts whose answers show whether a grader tells any apart."""
_WAY_OUT: Final = "mend it in a new version, which wants a new job, or waive what was found of this one and resume the job"
_LOSSES: Final = {"grpo": "ppo", "dapo": "dapo", "gspo": "gspo"}
"""By the server's names: GRPO is its clipped ratio, with advantages of the group."""


def train(work: Work) -> JobResult:
    """Train, publish, compare. Begun again after any death, it goes on with the same groups."""
    spec, wanted, method = work.spec, work.spec.evaluation, work.spec.method
    assert isinstance(method, Reinforcement)
    given = problems(rows_of(work.client, spec, spec.data.train), work.tokenizer, spec.room, spec.data.train)
    held = problems(rows_of(work.client, spec, wanted.split, wanted.rows), work.tokenizer, spec.room, wanted.split)
    words, held_out = prompt_words(held), _different(held)
    work.reporter.note(f"{len(given)} prompts to train on, {len(held_out)} held out", key="rows")
    if method.agent is not None:
        given, held_out = [*map(conversation, given)], [*map(conversation, held_out)]
    scores = None if method.grader is None else scores_by(work.client, method.grader, method.grader_version)
    unseen = None if method.held_out_grader is None else scores_by(work.client, method.held_out_grader, method.held_out_grader_version)
    shown = scores if scores is None or unseen is None else beside(scores, unseen, _share(method), _noted(work))
    with rewarding(work, method) as rewards:
        if work.cursor is None:
            require_trust(work, method, given, partial(rewards, scores))
        with rewards(shown) as rewarded:
            loop = _loop(work, method, given, held_out, rewarded)
        both = Both(work.client.sampler(loop.first), work.client.sampler(loop.published.version))
        with rewards(scores) as rewarded:
            groups = held_out_groups(method, both, held_out, rewarded)
        compared = compare_rewards(work, groups, "reward")
        if unseen is not None:
            with rewards(unseen) as rewarded:
                compared += compare_rewards(work, held_out_groups(method, both, held_out, rewarded), "held_out_reward")
    samples = telling(replies(groups, words, work.tokenizer)) if wanted.answers else []
    return loop.published.result(compared, samples, loop.first)


def require_trust(work: Work, method: Reinforcement, given: Sequence[Problem], opened: Opened) -> None:
    """Before anything is spent: the graders are attacked on the job's prompts, unless the server knows what comes of it. The job stands still where
    one of them pays without competence, or the one that is trained on pays for everything alike; until it is waived, or another job has a version
    that is mended. Rewards that an agent gives by itself nobody can attack, and they are tried on what the model does."""
    if method.grader is None:
        if work.spec.begin is None:
            _require_varied(work, method, given, opened)
        return
    found = _attacked(work, "grader", method.grader, method.grader_version)
    # Also where the first of them is to be mended: whoever mends it knows of both.
    unseen = None if method.held_out_grader is None else _attacked(work, "held-out grader", method.held_out_grader, method.held_out_grader_version)
    blocked = [each.finding for each in (found, unseen) if each is not None and each.blocks is not None]
    if blocked:
        raise StandsStill(f"{'; '.join(blocked)}; {_WAY_OUT}")
    if unseen is not None and not unseen.varied and unseen.grades > unseen.failed:
        # It stops no training, for what the base model cannot do yet it may tell apart later.
        told = "the held-out grader gave every attack the same score, and right answers too: where it goes on so, it sees nothing"
        work.reporter.note(told, level="warning", key="held out grader is constant")
    if not found.varied and found.waiver is None and work.spec.begin is None:
        _require_varied(work, method, given, opened)


def _attacked(work: Work, which: str, grader: str, version: int | None) -> GraderAttack:
    """What attacks of one of the job's graders come to, which is told."""
    data, key = work.spec.data, which.replace("-", " ")
    work.reporter.note(f"asks whether its {which} pays without competence; where nobody knows, it is attacked now", key=f"attacking {key}")
    found = work.client.graders.attack(grader, version=version, dataset=data.dataset, dataset_version=data.version, split=data.train)
    level = "info" if found.verdict == "sound" else "warning"
    # Why it is blocked is said by what blocks it.
    why = "" if found.blocks is not None else f": {found.why}"
    work.reporter.note(f"the {which} is {found.verdict} to attacks{why}", level=level, key=f"attack {key}", attack=found.id)
    if found.waiver is not None:
        waived = f"attacks of the {which} count for nothing: waived by {found.waiver.by}, {found.waiver.reason}"
        work.reporter.note(waived, level="warning", key=f"waiver {key}", **found.waiver.model_dump())
    return found


def _require_varied(work: Work, method: Reinforcement, given: Sequence[Problem], opened: Opened) -> None:
    """A grader that gave every attack the same may know right answers that no attack does, so it is tried on the model's own."""
    sampler = work.client.sampler(work.spec.base_model)
    with opened() as rewarded:
        probed = groups_of(groups_by(lambda: sampler, rewarded, _answers(method)), _different(given)[:_PROBED])
    rewards = [member.reward for group in probed for member in group.members]
    if not rewards and (lost := reasons(probed)):
        # The job's steps would be spent on the same.
        attempts = sum(len(group.failures) for group in probed)
        told = f"of {attempts} attempts at a rollout of `{method.agent or method.grader}` none came to a reward: {lost[0].kind} ({lost[0].message})"
        raise StandsStill(f"{told}; mend that, and resume the job")
    if len(set(rewards)) != 1:
        return
    given_to, answers = f"it gives {rewards[0]:g}", f"{len(rewards)} answers of `{work.spec.base_model}`"
    if method.grader is None:
        taught = f"agent `{method.agent}` teaches nothing: {given_to} to all of {answers}"
        raise StandsStill(f"{taught}; have it tell better from worse, and resume the job")
    taught = f"grader `{method.grader}` version {method.grader_version} teaches nothing: {given_to} to every attack and to {answers}"
    raise StandsStill(f"{taught}; {_WAY_OUT}")


def _loop(work: Work, method: Reinforcement, given: Sequence[Problem], held_out: Sequence[Problem], rewarded: Grade | Environment) -> Looped:
    every = work.spec.evaluation.every
    config = replace(grpo_config(work.spec, work.run_options, work.request), evaluate_every=every)
    looked_at = held_out if every else ()

    def go_on(cursor: JobCursor, stepped: OnStep) -> Policy:
        more: dict[str, Any] = {"steps": method.steps, "held_out": looked_at, "on_step": stepped, "recorder": recorder_of(work)}
        if isinstance(config, async_grpo.AsyncGrpoConfig):
            policy = async_grpo.train(work.client, given, rewarded, config, cursor, **more)
        else:
            policy = grpo.train(work.client, given, rewarded, config, cursor, **more)
        if not policy.step:
            name = work.spec.name
            why = (
                f"no group of answers had different rewards (`bloomery job points {name}` has them), or none could be graded "
                f"(`bloomery job events {name}` says what failed): begin where some answers of a group are better than others, or grade more finely"
            )
            raise InvalidInput(f"nothing was learnt in {policy.cursor.round} steps: {why}", field="method.grader")
        return policy

    def look(sampler: Sampler) -> dict[str, float]:
        measured = grpo.measure(sampler, held_out, rewarded, config.evaluation, concurrency=config.concurrency)
        return {"reward": measured.mean} if measured.means else {}

    return looped(work, method.steps, go_on, look, named, stopped="the held-out reward rose no more")


def _share(method: Reinforcement) -> float:
    """Of a job that was made."""
    assert method.held_out_share is not None
    return method.held_out_share


def _noted(work: Work) -> Callable[[str], None]:
    return lambda why: work.reporter.note(f"the held-out grader: {why}", level="warning", key=f"held out {why}")


def _answers(method: Reinforcement) -> RolloutConfig:
    """Some to each problem, with seeds that follow from it; what the version before said is a guess at what the next one says."""
    return RolloutConfig(group_size=_SAMPLES, max_tokens=method.max_tokens, reuse=True)


class HeldOutGroups(NamedTuple):
    """Answers to the same prompts by both models, drawn by the same seeds."""

    before: list[Group]
    after: list[Group]


def held_out_groups(method: Reinforcement, both: Both, held_out: Sequence[Problem], rewarded: Grade | Environment) -> HeldOutGroups:
    """Some answers of each to every prompt, graded."""
    served = [both.before]
    rollouts = groups_by(lambda: served[-1], rewarded, _answers(method))
    before = groups_of(rollouts, held_out)
    served.append(both.after)
    return HeldOutGroups(before, groups_of(rollouts, held_out))


def compare_rewards(work: Work, groups: HeldOutGroups, name: Literal["reward", "held_out_reward"]) -> list[Compared]:
    """The mean reward of held-out prompts, on the same draws."""
    rewards = [(_rewards(old), _rewards(new)) for old, new in zip(*groups, strict=True)]
    known = [(fmean(old), fmean(new)) for old, new in rewards if old and new]
    if lost := len(rewards) - len(known):
        work.reporter.note(f"{lost} held-out prompts have no {name}, and are left out", level="warning", key=f"lost {name}")
    if not known:
        return []
    return [paired(name, [old for old, _ in known], [new for _, new in known], higher_is_better=True)]


def replies(groups: HeldOutGroups, words: Mapping[str, Words], tokenizer: ChatTokenizer) -> Iterator[Answered]:
    """Of each prompt the first draw that both models came to a reward with."""
    for old, new in zip(*groups, strict=True):
        after = {member.rollout.id: member for member in new.members}
        drawn = next(((member, after[member.rollout.id]) for member in old.members if member.rollout.id in after), None)
        if drawn is not None:
            yield Answered(words[old.problem.id], *(Reply(said(last_answer_tokens(each.rollout), tokenizer), each.reward) for each in drawn))


def last_answer_tokens(rollout: Rollout) -> list[int]:
    """What was sampled; of an agent that takes turns, its last answer."""
    last = rollout.answers[-1] if rollout.answers else rollout.id
    return [token for segment in rollout.segments for token, turn in zip(segment.sampled, segment.turns, strict=True) if turn == last]


def _rewards(group: Group) -> list[float]:
    return [member.reward for member in group.members]


def grpo_config(spec: JobSpec, run_options: RunOptions, request: str) -> GrpoConfig | async_grpo.AsyncGrpoConfig:
    """The recipe's settings of a resolved spec."""
    method = spec.method
    assert isinstance(method, Reinforcement)
    assert spec.seed is not None
    policy = replace(
        policy_config(spec, method.optimizer, method.steps, run_options, request), loss=_LOSSES[method.loss], loss_config=_thresholds(method.clip)
    )
    rollouts = RolloutConfig(group_size=method.group_size, max_tokens=method.max_tokens, temperature=method.temperature, seed=spec.seed)
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
        "zero_variance": method.zero_variance,
        "kl_coefficient": method.kl_coefficient,
        **stopping_config(spec, method.early_stopping),
    }
    if not method.asynchronous:
        return GrpoConfig(**common)
    assert method.max_staleness is not None
    return async_grpo.AsyncGrpoConfig(**common, max_head_offpolicy_versions=method.max_staleness)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """As the axis of training has them: what the held-out grader said stands beside the reward and not among its parts."""
    return {name.replace(f"reward/part/{HELD_OUT}", HELD_OUT): value for name, value in metrics.items()}


def _different(given: Sequence[Problem]) -> list[Problem]:
    """One of those with the same prompt: they would get the same answers. What an agent makes of a row is its own."""
    return list({problem.prompt or problem.id: problem for problem in given}.values())


def _thresholds(clip: Clip) -> tuple[tuple[str, float], ...]:
    given = {"clip_low_threshold": clip.low, "clip_high_threshold": clip.high}
    return tuple((name, value) for name, value in given.items() if value is not None)
