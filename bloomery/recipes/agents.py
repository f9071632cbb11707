"""Agents of many turns as rollouts: a function of yours talks to the model by an unmodified OpenAI client, uses its tools, and a reward comes of it.

    with Agents(agent, tokenizer) as agents:
        policy = train(client, problems, agents, config, Path("cursor.json"), steps=30)

`agent(episode)` runs once for each rollout, on a thread and under a deadline. What it gives is the reward; or it gives nothing, and the reward is
reported to `POST {base_url}/reward` before it returns. Whatever it was answered is trained on as it was served (`segments`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from bloomery.client import Sampler
from bloomery.recipes.agent_chat import Message
from bloomery.recipes.agent_door import Door
from bloomery.recipes.agent_sessions import Session
from bloomery.recipes.deadlines import Deadlines, check_times
from bloomery.recipes.reuse import Earlier
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Environment, Failure, Graded, Group, MakesGroups, Problem, Rollout, RolloutConfig, derived_seed, judge
from bloomery.recipes.segments import Turn, assemble
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput


class Episode(NamedTuple):
    """What an agent is given: a problem, and where and as whom to ask the model for it."""

    rollout_id: str
    problem: Problem
    base_url: str
    api_key: str
    """Of this rollout alone, and of no use once it is over."""
    model: str
    attempt_id: str
    """Of this attempt at the rollout, for whoever must not mistake an earlier one for it."""
    keyed_url: str
    """The base URL with the key within: for an agent that sends a key of its own."""
    timeout_s: float
    """How long the rollout may take."""
    conversation: Callable[[], list[Message]]
    """The longest that was answered so far, with its answer."""


Agent = Callable[[Episode], "float | Reward | None"]
"""A plain number, a `Reward` with those of single answers, or None where the reward is reported."""


class Agents(Environment):
    """Takes the place of a grader in `grpo.train`, `async_grpo.train` and `measure`; its door is open within its `with`."""

    def __init__(self, agent: Agent, tokenizer: ChatTokenizer, *, model: str = "policy", timeout_s: float = 120.0, host: str = "127.0.0.1") -> None:
        check_times(timeout_s=timeout_s)
        self._agent, self._tokenizer, self._model, self._timeout_s = agent, tokenizer, model, timeout_s
        self._door = Door(host)
        self._open = False

    def __enter__(self) -> Self:
        self._door.__enter__()
        self._open = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._open = False
        self._door.__exit__(*raised)

    def rollouts(self, newest: Callable[[], Sampler], config: RolloutConfig) -> MakesGroups:
        """`max_tokens` bounds each answer; a rollout is of the weights that were the newest when it began."""
        if not self._open:
            # An agent would ask where nobody answers, to its deadline, time and again.
            raise InvalidInput("the door of these agents is not open: use them within `with Agents(...) as agents:`", field="grade")
        if config.piece_tokens is not None:
            raise InvalidInput("`piece_tokens` is not offered for agents: an answer is sampled at once", field="piece_tokens")
        return AgentRollouts(self._agent, partial(self._session, config), newest, config, self._door, self._timeout_s)

    def _session(self, config: RolloutConfig, rollout_id: str, place: tuple[int, ...], sampler: Sampler, earlier: Earlier | None) -> Session:
        tokenizer, model, timeout_s = self._tokenizer, self._model, self._timeout_s
        return Session(rollout_id, place, sampler, tokenizer, config, model=model, timeout_s=timeout_s, earlier=earlier)


class AgentRollouts(MakesGroups):
    """Groups of rollouts of one agent."""

    bounds_itself = True

    def __init__(
        self, agent: Agent, session: Callable[..., Session], newest: Callable[[], Sampler], config: RolloutConfig, door: Door, timeout_s: float
    ) -> None:
        self._agent, self._session, self._newest, self._config, self._door = agent, session, newest, config, door
        self._timeout_s = timeout_s
        self._deadlines = Deadlines()
        self._earlier = Earlier() if config.reuse else None

    def group(self, number: int, problem: Problem) -> Group:
        """Attempts that fail are made again, with the same seeds. An error of the loop's own making, a key that lacks a scope say, is raised."""
        failures: list[Failure] = []
        graded: dict[int, Graded] = {}
        for attempt in range(self._config.attempts):
            waiting = [member for member in range(self._config.group_size) if member not in graded]
            for member, outcome in zip(waiting, self._attempt(number, problem, waiting), strict=True):
                if isinstance(outcome, Graded):
                    graded[member] = outcome
                else:
                    failures.append(outcome._replace(final=attempt + 1 == self._config.attempts))
            if len(graded) == self._config.group_size:
                break
        return Group(number, problem, tuple(graded[member] for member in sorted(graded)), tuple(failures))

    def take_times_s(self) -> list[float]:
        """Of the agent, its answers included."""
        return self._deadlines.take_times_s()

    def _attempt(self, number: int, problem: Problem, members: Sequence[int]) -> list[Graded | Failure]:
        sampler = self._newest()
        place = number if self._earlier is None else derived_seed(self._config.seed, *problem.id.encode(errors="surrogatepass"))
        sessions = [self._session(f"{number}.{member}", (place, member), sampler, self._earlier) for member in members]
        for session in sessions:
            self._door.admit(session)
        try:
            episodes = [self._episode(problem, session) for session in sessions]
            outcomes = self._deadlines.all([partial(self._agent, episode) for episode in episodes], self._timeout_s)
        finally:
            for session in sessions:
                self._door.dismiss(session)
        turns = [session.close() for session in sessions]
        for error in (session.failure for session in sessions):
            if error is not None and error.category == "user":
                # A key or a version that is good for nothing: no agent can mend that, and no other attempt.
                raise error
        return [settle(problem, *attempted) for attempted in zip(sessions, turns, outcomes, strict=True)]

    def _episode(self, problem: Problem, session: Session) -> Episode:
        door, key = self._door, session.key
        return Episode(
            session.rollout_id,
            problem,
            door.base_url,
            key,
            session.model,
            session.attempt_id,
            door.keyed_url(key),
            self._timeout_s,
            session.conversation,
        )


def settle(problem: Problem, session: Session, turns: Sequence[Turn], outcome: Any) -> Graded | Failure:
    """What became of an attempt.

    An agent that the server failed did nothing wrong when it raised, and what it returned is no reward: it may well have caught the error and called
    that a zero. A report that was refused says why an agent raised, or never came to an end.
    """
    settled = judge(rollout_of(session.rollout_id, problem, turns)._replace(kept=session.kept), session.reward if outcome is None else outcome)
    late = isinstance(settled, Failure) and settled.kind == "timeout"
    if (failure := session.failure) is not None and not late:
        return Failure(session.rollout_id, "sampling", failure.message, final=False)
    if isinstance(settled, Failure):
        if session.refused is not None and (outcome is None or settled.kind in ("raised", "timeout")):
            return Failure(session.rollout_id, session.refused.kind, session.refused.message, final=False)
        return settled
    if not turns:
        return Failure(session.rollout_id, "no_tokens", "the agent asked the model for nothing, so there is nothing to train on", final=False)
    return settled


def rollout_of(rollout_id: str, problem: Problem, turns: Sequence[Turn]) -> Rollout:
    """An agent's answers as one rollout; `turns` in the order in which they were asked for."""
    segments = assemble(turns)
    return Rollout(
        rollout_id,
        problem,
        tuple(token for segment in segments for token in segment.sampled),
        tuple(logprob for segment in segments for logprob in segment.logprobs),
        tuple(version for segment in segments for version in segment.versions),
        stopped=bool(turns) and turns[-1].stopped,
        laid_out=segments,
        answers=tuple(turn.id for turn in turns),
        temperature=turns[0].temperature if turns else 1.0,
    )
