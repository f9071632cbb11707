"""One attempt at a rollout, as the agent meets it: a key of its own, answers by one version of the weights, and a record of what was served.

The prompt that is sampled from is the one that is kept, token by token, with what was sampled behind it. A conversation that goes on from an answer
goes on from the tokens that were served: what users, tools and the template add is tokenised, and what the model said is not, unless the template
leaves out some of it or writes it in other words, which is a conversation of its own (`segments`). Seeds follow from the rollout and the prompt, so
an attempt that asks the same is answered the same, in whatever order its sub-agents ask.
"""

import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bloomery.client import Sampler
from bloomery.client.sampling import PendingSample, Sampled
from bloomery.recipes.agent_chat import Asked, Message, going_on, plain, read_request, write_message, written_answer
from bloomery.recipes.reuse import Earlier
from bloomery.recipes.rewards import Fault, Reward, fault_of
from bloomery.recipes.rollouts import RolloutConfig, derived_seed
from bloomery.recipes.segments import Turn
from bloomery.render import ChatTokenizer
from bloomery.types.errors import BloomeryError, Gone, InvalidInput, Unavailable, WorkerError


class Session:
    """Threads may ask side by side. What is answered after `close` is no part of the rollout."""

    def __init__(
        self,
        rollout_id: str,
        place: tuple[int, ...],
        sampler: Sampler,
        tokenizer: ChatTokenizer,
        config: RolloutConfig,
        *,
        model: str = "policy",
        timeout_s: float = 120.0,
        earlier: Earlier | None = None,
    ) -> None:
        """`place` is what seeds follow from; with `earlier` it is the same in every epoch, and so is every answer's in it."""
        self.rollout_id, self.model = rollout_id, model
        self.key = secrets.token_urlsafe(24)
        self.attempt_id = f"{rollout_id}-{secrets.token_hex(8)}"
        self.reward: Reward | None = None
        """What was reported last, of what was taken."""
        self.refused: Fault | None = None
        """Why the last report was not taken, where none was since."""
        self.kept = 0
        """Tokens that an earlier rollout had right."""
        self._earlier = earlier
        self._began_s = int(time.time())
        self._place, self._sampler, self._tokenizer, self._config = place, sampler, tokenizer, config
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._open = True
        self._asked: Counter[str] = Counter()
        self._failed: dict[tuple[int, ...], BloomeryError] = {}
        """Why those answers did not come that the server owes, by their places."""
        self._answered: Counter[tuple[int, ...]] = Counter()
        """How often a prompt was asked for when it was answered last, by all of its place but that."""
        self._numbers: dict[str, int] = {}
        self._turns: dict[str, Turn] = {}
        self._said: dict[str, list[Message]] = {}
        self._written: dict[str, tuple[int, ...]] = {}
        """What the template made of the messages that each answer was asked with."""
        self._longest: list[Message] = []

    @property
    def failure(self) -> BloomeryError | None:
        """Why the server did not answer, where it did not: of what was asked last, and not answered when it was asked again."""
        with self._lock:
            left = [error for (*prompt, again), error in self._failed.items() if self._answered[tuple(prompt)] <= again]
            return left[-1] if left else None

    def shown(self) -> dict[str, Any]:
        """The model of this rollout, as lists of models have it."""
        return {"id": self.model, "object": "model", "created": self._began_s, "owned_by": "bloomery"}

    def answer(self, body: Mapping[str, Any], is_there: Callable[[], bool]) -> tuple[Asked, dict[str, Any]]:
        """A chat completion; recorded unless whoever asked has gone meanwhile and will never read it."""
        asked = read_request(body, self.model, self._config.max_tokens, self._config.temperature)
        written = tuple(self._tokenizer.render_prompt(asked.messages, tools=asked.tools or None))
        before = self._continued(asked.messages)
        prompt = written if before is None else self._going_on(before, asked, written)
        name, place = self._begin(prompt)
        with self._owed(place, but=InvalidInput):
            pending = self._ask(prompt, asked, place)
        with self._owed(place):
            sampled = self._wait(pending, place)
            (sequence,) = sampled.sequences
            message, reason = write_message(self._tokenizer, asked, name, sequence.tokens, stopped=sequence.stopped)
        if is_there():
            turn = Turn(name, prompt, sequence.tokens, sequence.logprobs, sampled.version, sequence.stopped, before, self._config.temperature)
            self._record(turn, written, asked.messages, message, [*body["messages"], message], sum(sampled.kept))
            self._note_answered(place)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sequence.tokens), "total_tokens": len(prompt) + len(sequence.tokens)}
        return asked, {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": sampled.version,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
            "usage": usage,
        }

    def report(self, body: Mapping[str, Any]) -> None:
        """Take the reward; whose it is, is judged when the rollout ends. InvalidInput where it is malformed: what was reported before stands."""
        fault = _fault_of(body)
        with self._lock:
            self._check_open()
            self.refused = fault
            if fault is None:
                named = body.get("rollout_id", self.rollout_id)
                whose = self.rollout_id if named == self.attempt_id else named
                self.reward = Reward(whose, body["reward"], body.get("parts", {}), body.get("turns", {}), body.get("reason", ""))
        if fault is not None:
            raise InvalidInput(fault.message, field=fault.field)

    def conversation(self) -> list[Message]:
        """The longest that was answered, as it was sent, with its answer; the later one of two. Empty where nothing was asked."""
        with self._lock:
            return list(self._longest)

    def close(self) -> list[Turn]:
        """The answers, in the order in which they were asked for; nothing is taken any more."""
        with self._lock:
            self._open = False
            return sorted(self._turns.values(), key=lambda turn: self._numbers[turn.id])

    def _begin(self, prompt: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The name of an answer, and its place among all of the loop: asked the same again, a rollout gets another one."""
        digest = _digest(self.rollout_id, *prompt)
        with self._lock:
            self._check_open()
            again = self._asked[digest]
            self._asked[digest] += 1
            name = f"chatcmpl-{digest}{again:04d}"
            self._numbers[name] = len(self._numbers)
        # The rollout's id is another one in every epoch.
        asked = digest if self._earlier is None else _digest(*prompt)
        return name, (*self._place, int(asked, 16), again)

    def _ask(self, prompt: tuple[int, ...], asked: Asked, place: tuple[int, ...]) -> PendingSample:
        (draft,) = [()] if self._earlier is None else self._earlier.of(place, 1)
        seed, drafts = derived_seed(self._config.seed, *place), [draft[: asked.max_tokens]] if draft else None
        return self._sampler.sample(prompt, max_tokens=asked.max_tokens, seed=seed, temperature=self._config.temperature, drafts=drafts)

    def _wait(self, pending: PendingSample, place: tuple[int, ...]) -> Sampled:
        left_s = min(self._config.sample_timeout_s, self._deadline - time.monotonic())
        sampled = pending.result(max(0.0, left_s))
        if self._earlier is not None:
            self._earlier.keep(place, [sampled.sequences[0].tokens])
        return sampled

    @contextmanager
    def _owed(self, place: tuple[int, ...], *, but: type[BloomeryError] | tuple[()] = ()) -> Iterator[None]:
        """An answer that does not come is remembered, because what the agent makes of it may look like a reward.

        `but` is its own mistake: what it asks for may be refused, a prompt that is too long say. Key and version are the loop's, and whatever fails
        that was taken.
        """
        try:
            yield
        except but:
            raise
        except BloomeryError as error:
            self._note_failed(place, error)
            raise Unavailable(error.message) from error
        except Exception as error:
            self._note_failed(place, WorkerError(f"{type(error).__name__}: {error}"))
            raise

    def _note_failed(self, place: tuple[int, ...], error: BloomeryError) -> None:
        with self._lock:
            if self._open:
                self._failed[place] = error

    def _note_answered(self, place: tuple[int, ...]) -> None:
        *prompt, again = place
        with self._lock:
            self._answered[tuple(prompt)] = max(self._answered[tuple(prompt)], again + 1)

    def _going_on(self, before: str, asked: Asked, written: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that were served of the earlier answer, and what comes behind them now; what the template writes where it tells that anew."""
        with self._lock:
            turn, said, then = self._turns[before], self._said[before], self._written[before]
        tokenizer = self._tokenizer
        try:
            told = tuple(tokenizer.render_prompt(said, add_generation_prompt=False, tools=asked.tools or None))
        except InvalidInput:
            # A template may refuse a conversation that ends so, and not one that goes on.
            return written
        answer = written_answer(then, told, tokenizer.end_tokens)
        if not answer or written[: len(told)] != told or self._read_back(before, asked, answer) != said[-1]:
            return written
        return going_on((*turn.prompt, *turn.tokens), written[len(then) + len(answer) - 1 :], tokenizer.end_tokens) or written

    def _read_back(self, name: str, asked: Asked, answer: tuple[int, ...]) -> Message | None:
        """What the template made of an answer, read as the answer was: spaces between what it calls may be others, and words may not."""
        try:
            return plain(0, write_message(self._tokenizer, asked, name, answer, stopped=True)[0])
        except InvalidInput:
            return None

    def _record(self, turn: Turn, written: tuple[int, ...], messages: list[Message], message: Message, heard: list[Message], kept: int) -> None:
        try:
            said = [*messages, plain(len(messages), message)]
        except InvalidInput:
            # A call whose arguments are no JSON: no conversation can go on from it word by word.
            said = []
        with self._lock:
            if self._open:
                self._turns[turn.id], self._written[turn.id] = turn, written
                self._said[turn.id] = said
                self.kept += kept
                self._longest = max(heard, self._longest, key=len)

    def _continued(self, messages: list[Message]) -> str | None:
        """The answer that these messages go on from: the latest that they hold."""
        with self._lock:
            before = [(len(said), name) for name, said in self._said.items() if said and messages[: len(said)] == said]
        return max(before)[1] if before else None

    def _check_open(self) -> None:
        if not self._open:
            raise Gone(f"rollout {self.rollout_id} is over: its time was up, or its agent has returned")


def _digest(*told: Any) -> str:
    return hashlib.sha256(" ".join(map(str, told)).encode()).hexdigest()[:16]


def _fault_of(report: Mapping[str, Any]) -> Fault | None:
    """What is wrong with it, whosever it is."""
    unknown = report.keys() - {"reward", "rollout_id", "turns", "parts", "reason"}
    if unknown or "reward" not in report:
        return Fault("wrong_type", "a report has `reward`, and may have `turns`, `parts`, `reason` and `rollout_id`", min(unknown, default="reward"))
    whose = report.get("rollout_id", "")
    if not isinstance(whose, str):
        return Fault("wrong_type", f"`rollout_id` is a {type(whose).__name__}, not a string", "rollout_id")
    return fault_of(Reward(whose, report["reward"], report.get("parts", {}), report.get("turns", {}), report.get("reason", "")))
