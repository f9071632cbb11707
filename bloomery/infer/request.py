"""One request while it is served: its tokens, its samples, and when they are done."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from bloomery.infer.grammar import Guide
from bloomery.infer.inquiry import Inquiry
from bloomery.infer.plan import Sample, Stem
from bloomery.infer.retrace import Retrace
from bloomery.infer.sampling import Draw
from bloomery.infer.versions import Model
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import FinishReason, Generate, Live, PromptScored

_GUIDED_DRAFT: Final = 16
"""Tokens."""


class Request:
    """A request and the samples of it that are not finished."""

    def __init__(self, generate: Generate, model: Model, guides: Sequence[Guide] = (), *, since_s: float) -> None:
        """`guides`: one for each sample where there is a grammar; they know of `generate.begun` already. `since_s`: when it came."""
        self.generate, self.model = generate, model
        self.name = generate.weights.name if isinstance(generate.weights, Live) else None
        """What it is served by, where that may change while it runs."""
        self.prompt: list[int] = generate.prompt.numpy().tolist()
        self.stem = self._make_stem()
        """Its prompt under its weights of this moment."""
        self._told_versions: dict[int, str] = {}
        self.continuations: dict[int, list[int]] = {index: [] for index in range(generate.num_samples)}
        """Sampled tokens of each open sample."""
        self._guides = dict(enumerate(guides))
        self._since_s, self._unplaced = since_s, set(self.continuations)
        self.begun = False
        """Whether a sample of it has had a place in the cache."""
        self.inquiry = Inquiry(generate) if generate.scores_prompt else None
        """What its prompt is still to be scored for."""
        self.owes_routing = generate.routing
        """Whether its prompt's routing is asked for and was not told yet."""
        self._stop_tokens = frozenset(generate.params.stop_tokens)
        for index, begun in enumerate(generate.begun):
            self.continuations[index] += begun
        self._drafts = {index: draft for index, draft in enumerate(generate.drafts) if draft[: len(self.continuations[index])] == self._so_far(index)}
        """Of the samples whose tokens so far are what their drafts say."""
        self._retraces: dict[int, Retrace] = {}
        """Of those that have parted from theirs."""
        self._guesses: dict[int, tuple[int, ...]] = {}
        """What those say of the next tokens."""
        self.samples = self._make_samples()
        """All of them as the plan sees them."""
        self._said = sorted(set(self.prompt)) if generate.params.repetition_penalty != 1 else []

    @property
    def samples_in_prefill(self) -> bool:
        """Whether the one token that is wanted comes from the prefill itself."""
        return self.generate.params.max_tokens == 1 and self.generate.num_samples == 1

    def place(self, index: int, now_s: float) -> float | None:
        """A sample gets a place in the cache; how long it has waited for it, where that is its first."""
        if index not in self._unplaced:
            return None
        self._unplaced.remove(index)
        return now_s - self._since_s

    def tokens(self, index: int, start: int, stop: int) -> list[int]:
        """Tokens of prompt and continuation at positions `start` to `stop`."""
        prompt, sampled = self.prompt, self.continuations[index]
        return prompt[start:stop] + sampled[max(0, start - len(prompt)) : max(0, stop - len(prompt))]

    def fed(self, index: int, start: int, stop: int) -> list[int]:
        """The same with what is guessed behind them."""
        known = len(self.prompt) + len(self.continuations[index])
        return self.tokens(index, start, stop) + list(self.guessed(index)[max(0, start - known) : max(0, stop - known)])

    def guessed(self, index: int) -> tuple[int, ...]:
        """What the draft of a sample says of the tokens behind those that it has, or, where it has parted from that, may say."""
        return self._guesses[index] if index in self._guesses else self._drafts.get(index, ())[len(self.continuations[index]) :]

    def drafted(self, index: int) -> int:
        """Tokens of that to be fed next. The last token of a draft is fed to nobody: the row before it says whether it is drawn.

        A sample that is guided has few at a time, because its guide looks at one after the other while everybody waits.
        """
        count = max(0, len(self._drafts.get(index, ())) - len(self.continuations[index]) - 1)
        return min(count, _GUIDED_DRAFT) if index in self._guides else count

    def worth_guessing(self, index: int) -> int:
        """Tokens behind the next one of a sample that has parted from its draft: what may be right of them, and not the last that it may have."""
        retrace = self._retraces.get(index)
        return 0 if retrace is None else max(0, min(retrace.width, self.generate.params.max_tokens - len(self.continuations[index]) - 1))

    def guess(self, index: int, most: int) -> int:
        """Guess at so many; returns how many `guessed` says then, until its next token is there."""
        self._guesses[index] = self._retraces[index].guesses(self.continuations[index], most)
        return len(self._guesses[index])

    def note_guesses(self, index: int, fed: int, right: int) -> None:
        """So many of what was guessed were fed, and the first of them were right."""
        self._retraces[index].note(fed, right)

    def cached_stem(self, sample: Sample) -> Stem:
        """The tokens of a sample that lie in the cache."""
        return Stem(sample.stem.version, np.array(self.tokens(sample.index, 0, sample.cached), np.int32))

    def turn_to(self, model: Model) -> Stem:
        """Go on with other weights; returns what keys and values belong to that the weights before gave: to this request alone.

        A prompt that is not scored to its end is scored anew.
        """
        before, self.model, self.stem = self.model.version, model, self._make_stem(model.version)
        if self.inquiry is not None:
            self.inquiry = Inquiry(self.generate)
        return self._make_stem(f"{model.version} after {before} in {self.generate.request_id}")

    def version_news(self, index: int) -> str | None:
        """The weights of a sample's next token, where they are not those of the one before."""
        if self._told_versions.get(index) == self.model.version:
            return None
        self._told_versions[index] = self.model.version
        return self.model.version

    def draw(self, index: int, ahead: int = 0) -> Draw:
        """The next token to choose, or the one behind that and so many more as are guessed."""
        sampled, guide, params = self.continuations[index], self._guides.get(index), self.generate.params
        position = len(sampled) + ahead
        if ahead and params.penalises:
            sampled = [*sampled, *self.guessed(index)[:ahead]]
        allowed_V = None if guide is None else guide.allowed_V
        return Draw(index, position, params, self._said, sampled, allowed_V=allowed_V, top=self.generate.top_logprobs)

    def guide(self, index: int) -> Guide | None:
        """What leads a sample, if something does."""
        return self._guides.get(index)

    def stops(self, token: int) -> bool:
        """Whether a token ends a sample."""
        return token in self._stop_tokens

    def append(self, index: int, token: int) -> bool:
        """Take a sampled token; returns whether the draft of its sample said so."""
        draft, sampled = self._drafts.get(index, ()), self.continuations[index]
        if index in self._retraces:
            self._retraces[index].see(sampled, token)
        if draft[len(sampled) : len(sampled) + 1] == (token,):
            sampled.append(token)
            return True
        sampled.append(token)
        self._guesses.pop(index, None)
        if (parted := self._drafts.pop(index, None)) is not None and self._retraceable:
            self._retraces[index] = Retrace(parted)
        return False

    def append_kept(self, index: int, tokens: Sequence[int]) -> None:
        """Take tokens of which the draft of their sample is known to say every one."""
        self.continuations[index] += tokens

    def end(self, index: int, context: int) -> FinishReason | None:
        """Why a sample ends with its last token, if it does; known when its guide has taken it."""
        continuation, guide = self.continuations[index], self._guides.get(index)
        if continuation[-1] in self._stop_tokens:
            return "stop"
        full = len(continuation) == self.generate.params.max_tokens or len(self.prompt) + len(continuation) == context
        if guide is not None and guide.over and (full or not self._stop_tokens):
            # Whole, though no stop token says so.
            return "stop"
        return "length" if full else None

    def refusal(self, index: int) -> InvalidInput | None:
        """Why a sample cannot go on as its grammar wants it."""
        guide, grammar = self._guides.get(index), self.generate.grammar
        return None if guide is None or grammar is None else guide.refusal(grammar)

    def take_score(self) -> PromptScored | None:
        """The finished score of the prompt, once; from then on its keys and values may come from anywhere."""
        if self.inquiry is None or not self.inquiry.complete:
            return None
        scored, self.inquiry = self.inquiry.scored(), None
        for sample in self.samples:
            sample.reusable = sample.shared
        return scored

    @property
    def _retraceable(self) -> bool:
        """Not where a guide takes token after token, nor where it is told of each what was computed when it was fed."""
        return not (self._guides or self.generate.routing)

    def _so_far(self, index: int) -> tuple[int, ...]:
        return tuple(self.continuations[index])

    def _make_samples(self) -> list[Sample]:
        decodes = self.generate.params.max_tokens > 0 and not self.samples_in_prefill
        reusable = len(self.prompt) - 1 if self.inquiry is None else self.inquiry.first - 1
        return [
            Sample(
                self.generate.request_id,
                index,
                self.stem,
                length=len(self.prompt) + len(self.continuations[index]),
                reusable=reusable,
                decodes=decodes,
                left=0 if self.samples_in_prefill else 1,
                priority=self.generate.priority,
                drafted=self.drafted(index),
            )
            for index in self.continuations
        ]

    def _make_stem(self, version: str | None = None) -> Stem:
        return Stem(self.model.version if version is None else version, np.array(self.prompt, np.int32))
