"""What answers of a job of reinforcement are worth, by graders of the server: of those to prompts, and of what an agent came to."""

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from bloomery.client import Client
from bloomery.jobs.reporting import StandsStill
from bloomery.jobs.work import Work
from bloomery.recipes import remote_rollouts
from bloomery.recipes.agent_http import address_of
from bloomery.recipes.agents import Agents
from bloomery.recipes.remote_rollouts import Finished, RemoteRollouts
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Environment, Grade, Problem, Rollout
from bloomery.render import ChatTokenizer
from bloomery.render.rows import plain_message, plain_tools
from bloomery.types.datasets import PromptRow
from bloomery.types.errors import BloomeryError, Unavailable, WorkerError
from bloomery.types.graders import OutputRow
from bloomery.types.leases import LentAgent
from bloomery.types.methods import Reinforcement

HELD_OUT: Final = "reward/held_out"
"""What the held-out grader says, among the parts of rewards, whose names graders give, and on the training axis."""
TAKEN_S: Final = 600.0
"""How long a job waits for the port of its agent, which another job may have."""
_LOOK_EVERY_S: Final = 1.0


class Said(NamedTuple):
    """What a rollout came to, as graders take it."""

    rollout_id: str
    problem_id: str
    output: OutputRow


Scores = Callable[[Said], Reward]


def scores_by(client: Client, grader: str, version: int | None) -> Scores:
    """Of a grader, over the server; a result without a score is a failure of its kind and never a zero."""

    def score(said: Said) -> Reward:
        (result,) = client.graders.run(grader, [said.output], version=version).results
        if result.error is not None:
            kind = Unavailable if result.error.kind == "unavailable" else WorkerError
            raise kind(f"{result.error.kind}: {result.error.detail}")
        assert result.score is not None
        return Reward(said.rollout_id, result.score, result.metrics, reason=result.reason or "")

    return score


def beside(scores: Scores, held_out: Scores, share: float, note: Callable[[str], None]) -> Scores:
    """The same rewards, and of a share of the answers what another grader says, as a part that is shown. Where that one fails, nothing is shown."""

    def both(said: Said) -> Reward:
        reward = scores(said)
        if not _chosen(said, share):
            return reward
        try:
            other = held_out(said)
        except BloomeryError as error:
            note(error.message)
            return reward
        return replace(reward, parts={**reward.parts, HELD_OUT: other.value})

    return both


Rewards = Callable[[Scores | None], AbstractContextManager[Grade | Environment]]
"""Of a job, by one grader or another, within its `with`."""


@contextmanager
def rewarding(work: Work, method: Reinforcement) -> Iterator[Rewards]:
    """What a loop takes: grades of single answers, or the job's agent, whose server says what each rollout is worth where no grader does. The job has
    its agent from here to its end: between two of its loops nobody else takes it."""
    if method.agent is None:
        yield lambda scores: _of_prompts(scores, work.tokenizer)
        return
    if (agent := work.agent) is None:
        problem = f"agent `{method.agent}` is not there for this project any more: start the server with it (`--agents`)"
        raise StandsStill(f"{problem}, and resume the job")
    with _receiving(work, agent) as remote:
        yield lambda scores: Agents(partial(remote.scored, _of_agent(scores)), work.tokenizer, timeout_s=agent.timeout_s, host=agent.host)


@contextmanager
def _of_prompts(scores: Scores | None, tokenizer: ChatTokenizer) -> Iterator[Grade]:
    assert scores is not None
    yield grade_by(scores, tokenizer)


def _of_agent(scores: Scores | None) -> remote_rollouts.Score:
    def score(finished: Finished) -> Reward | None:
        return None if scores is None else scores(Said(finished.rollout_id, finished.problem.id, last_answer(finished)))

    return score


def grade_by(scores: Scores, tokenizer: ChatTokenizer) -> Grade:
    """Of the answer to a prompt."""

    def grade(rollout: Rollout) -> Reward:
        row: PromptRow = rollout.problem.data
        said = rollout.tokens[:-1] if rollout.stopped else rollout.tokens
        output = OutputRow(item=row.item, output=tokenizer.decode(said), messages=row.messages)
        return scores(Said(rollout.id, rollout.problem.id, output))

    return grade


def conversation(problem: Problem) -> Problem:
    """The prompt of a row as an agent's server is told it."""
    row: PromptRow = problem.data
    return remote_rollouts.problem(problem.id, [*map(plain_message, row.messages)], tools=plain_tools(row.tools) or (), ground_truth=row)


def last_answer(finished: Finished) -> OutputRow:
    """Of an agent: what the model said last, calls of tools in it, and all that was said before."""
    row: PromptRow = finished.problem.data["ground_truth"]
    *before, last = finished.messages or [{}]
    return OutputRow(item=row.item, output=str(last.get("content") or ""), tools=last.get("tool_calls") or [], messages=before)


def _receiving(work: Work, agent: LentAgent) -> RemoteRollouts:
    """Where its server says how rollouts end. One job has that at a time, and the others wait for it."""
    deadline_s = time.monotonic() + TAKEN_S
    while True:
        try:
            return RemoteRollouts(agent.url, port=agent.port, host=agent.host)
        except OSError as error:
            taken = f"{address_of(agent.host, agent.port)}, where agent `{agent.name}` says how its rollouts end, is not to be had: {error.strerror}"
            if error.errno != errno.EADDRINUSE:
                # An address of another machine, or a port that only root may have: no time mends it.
                mend = "mend its `host` or `port` in the file of `--agents`, start the server with it, and resume the job"
                raise StandsStill(f"{taken}; {mend}") from None
        if time.monotonic() > deadline_s:
            raise StandsStill(f"{taken}; another job may have the agent: resume this one once it is free")
        work.reporter.note(f"waits for its agent: {taken}", key="waits for its agent")
        work.reporter.check()
        time.sleep(_LOOK_EVERY_S)


def _chosen(said: Said, share: float) -> bool:
    """By what was said and not by chance: the same answer is looked at whenever a process begins again."""
    told = json.dumps([said.problem_id, said.output.output, said.output.messages], sort_keys=True)
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") < share * 2.0**64
