"""One request while it is served: it samples, turns tokens into text, and leaves a record however it ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from bloomery.api.routes.openai.answers import Answers, PromptTable, Usage
from bloomery.api.routes.openai.choices import Choice, Piece, prompt_piece, prompt_table
from bloomery.obs import background
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.data.span_rows import Inference, RecordedSample
from bloomery.services.serving.sampling import Progress, SampleStream
from bloomery.types.errors import Unavailable, code_of
from bloomery.types.generation import PromptEmbedded, PromptRouted, PromptScored, SampledToken, SampleFinished
from bloomery.types.ids import now_us
from bloomery.types.traffic import SpanStatus

TOGETHER: Final = 64
"""Chunks of a stream that are written at once, where so many are there."""


class Step(NamedTuple):
    """Something new about a choice; `choice.reason` is set with the last step of it."""

    choice: Choice
    piece: Piece


class Serving:
    """Made for one request; a bad one is refused here, before the first token."""

    def __init__(self, services: Services, caller: Principal, answers: Answers) -> None:
        self.answers, self.prepared = answers, answers.prepared
        self._caller, self._traffic, self._limits = caller, services.traffic, services.limits
        self._tokenizer = services.models.tokenizer(self.prepared.target.base_hash)
        self._choices = [self._choice(index) for index in range(len(self.prepared.prompts) * self.prepared.samples)]
        self._texts: list[list[Piece]] = [[] for _ in self._choices]
        self._scored: dict[int, PromptScored] = {}
        self._echoes: dict[int, Piece] = {}
        self._unfinished = len(self._choices)
        """Choices that have no end yet."""
        self._opened: set[int] = set()
        """Choices that a stream has begun to tell."""
        self._first_token_us: int | None = None
        self._begun: set[int] = set()
        """Prompts of which something came."""
        self._status: SpanStatus = "cancelled"
        self._error_code: str | None = None
        requests = map(self.prepared.generate, range(len(self.prepared.prompts)))
        self._streams = [services.sampling.stream(caller, self.prepared.target, request, bounded=True) for request in requests]
        self._limits.prompt(caller, self.usage.prompt, field="messages" if self.prepared.kind == "chat" else "prompt")

    @property
    def usage(self) -> Usage:
        """So far."""
        cached = sum(stream.found_tokens for stream in self._streams)
        return Usage(sum(map(len, self.prepared.prompts)), _tokens_of(self._choices), cached)

    async def whole(self) -> dict[str, Any]:
        """Serve to the end and answer in one piece."""
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        return self.answers.body(self._shapes(), self.usage, self._tables())

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Serve piece by piece, those together that are there together."""
        held: list[dict[str, Any]] = []
        try:
            async with aclosing(self.steps()) as steps:
                async for step in steps:
                    held += self._told(step) if step is not None else ()
                    if full := len(held) >= TOGETHER:
                        # Others are served in between.
                        await asyncio.sleep(0)
                    if full or (held and not self._more):
                        yield held
                        held = []
        except Exception:
            # What is held back is on the record and on the bill.
            if held:
                yield held
            raise
        if self.answers.counts:
            held.append(self.answers.chunk([], self.usage))
        if held:
            yield held

    async def steps(self) -> AsyncGenerator[Step | None, None]:
        """Sample until every choice is finished; recorded in any case. None for an event that tells nothing new about a choice."""
        try:
            async with aclosing(_merged(self._streams)) as events:
                async for prompt, event in events:
                    yield self._take(prompt, event)
                    if not self._unfinished:
                        break
            self._status = "ok"
        except Exception as error:
            self._status, self._error_code = "error", code_of(error)
            raise
        finally:
            self._charge()
            self._record()

    @property
    def _more(self) -> bool:
        """Whether more comes at once: the end, or an event that is there already."""
        return not self._unfinished or any(stream.more for stream in self._streams)

    def _told(self, step: Step) -> list[dict[str, Any]]:
        """The chunks that tell of a step."""
        choice, piece = step
        told = [] if choice.index in self._opened else [self.answers.chunk([opening]) for opening in self._openings(choice)]
        self._opened.add(choice.index)
        if piece.text or piece.tokens or choice.reason:
            told.append(self.answers.chunk([self.answers.delta(choice.index, self._behind_echo(choice, piece), choice.reason)]))
        return told

    def _charge(self) -> None:
        """The key pays for what was sampled, and not for prompts that were refused before anything came of them."""
        self._limits.give_back(self._caller, sum(len(tokens) for prompt, tokens in enumerate(self.prepared.prompts) if self._was_refused(prompt)))
        self._limits.sampled(self._caller, self.usage.completion)

    def _was_refused(self, prompt: int) -> bool:
        """Before anything came of it."""
        return self._status == "error" and prompt not in self._begun

    def _take(self, prompt: int, event: Progress) -> Step | None:
        self._begun.add(prompt)
        if isinstance(event, PromptScored):
            self._scored[prompt] = event
        if isinstance(event, PromptScored | PromptRouted | PromptEmbedded):
            return None
        choice = self._choices[prompt * self.prepared.samples + event.sample]
        if choice.reason is not None:
            return None
        piece = self._token(choice, event) if isinstance(event, SampledToken) else self._end(choice, event)
        if choice.reason is not None:
            self._unfinished -= 1
            if isinstance(event, SampledToken):
                self._streams[prompt].abort(event.sample)
        self._texts[choice.index].append(piece)
        return Step(choice, piece)

    def _token(self, choice: Choice, event: SampledToken) -> Piece:
        self._first_token_us = self._first_token_us or now_us()
        return choice.feed(event)

    def _end(self, choice: Choice, event: SampleFinished) -> Piece:
        if event.reason == "abort":
            raise Unavailable("the engine gave this request up: send it again")
        return choice.finish(event.reason)

    def _choice(self, index: int) -> Choice:
        prepared = self.prepared
        shows_tokens = prepared.top_logprobs is not None
        return Choice(
            index,
            self._tokenizer,
            stops=prepared.asked.stops,
            ends=prepared.end_tokens,
            shows_tokens=shows_tokens,
            # Who scores an echo leaves out what was sampled by its number, as lm-eval does.
            shows_end=prepared.echo,
            min_tokens=prepared.asked.min_tokens or 0,
            mode=prepared.logprobs_mode,
        )

    def _shapes(self) -> list[dict[str, Any]]:
        answered = [choice for prompt in range(len(self.prepared.prompts)) for choice in self._answered(prompt)]
        return [self.answers.choice(index, self._whole_piece(choice), choice.reason) for index, choice in enumerate(answered)]

    def _drawn(self, prompt: int) -> list[Choice]:
        """All choices of a prompt, in their order."""
        return self._choices[prompt * self.prepared.samples : (prompt + 1) * self.prepared.samples]

    def _answered(self, prompt: int) -> list[Choice]:
        """The choices of a prompt that are answered, in their order."""
        mine = self._drawn(prompt)
        if self.prepared.shown is None:
            return mine
        return sorted(mine, key=lambda choice: -choice.likelihood)[: self.prepared.shown]

    def _tables(self) -> list[PromptTable]:
        top = self.prepared.asked.prompt_logprobs
        if top is None:
            return []
        return [prompt_table(self._tokenizer, tokens, self._scored[prompt], top) for prompt, tokens in enumerate(self.prepared.prompts)]

    def _openings(self, choice: Choice) -> list[dict[str, Any]]:
        """What a stream says before the first token of a choice."""
        opening, echoed = self.answers.opening(choice.index), self._echoed(choice)
        prompt = None if echoed is None else self.answers.delta(choice.index, echoed, None)
        return [each for each in (opening, prompt) if each is not None]

    def _whole_piece(self, choice: Choice) -> Piece:
        pieces = self._texts[choice.index]
        text, tokens = "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]
        piece, echoed = self._behind_echo(choice, Piece(text, tokens)), self._echoed(choice)
        return piece if echoed is None else Piece(echoed.text + piece.text, echoed.tokens + piece.tokens)

    def _behind_echo(self, choice: Choice, piece: Piece) -> Piece:
        """The piece with its tokens where they stand behind the echoed prompt."""
        echoed = self._echoed(choice)
        return piece if echoed is None else piece.moved(len(echoed.text))

    def _echoed(self, choice: Choice) -> Piece | None:
        """The prompt of a choice, where it is part of the answer."""
        if not self.prepared.echo:
            return None
        prompt = choice.index // self.prepared.samples
        if prompt not in self._echoes:
            scored = self._scored.get(prompt) if self.prepared.top_logprobs is not None else None
            self._echoes[prompt] = prompt_piece(self._tokenizer, self.prepared.prompts[prompt], scored, self.prepared.top_logprobs or 0)
        return self._echoes[prompt]

    def _record(self) -> None:
        """A span for each prompt: the first has the id of the answer and is the parent of the others."""
        for prompt, tokens in enumerate(self.prepared.prompts):
            self._traffic.record(self._inference(prompt, tokens))

    def _inference(self, prompt: int, tokens: Sequence[int]) -> Inference:
        prepared, mine = self.prepared, self._answered(prompt)
        given = prepared.body if len(prepared.prompts) == 1 else prepared.body | {"prompt": prepared.body["prompt"][prompt]}
        metadata = prepared.asked.metadata or {}
        return Inference(
            id=prepared.id if prompt == 0 else f"{prepared.id}-{prompt}",
            project=self._caller.project,
            kind=prepared.kind,
            target=prepared.target,
            template_hash=prepared.template_hash,
            request=given,
            choices=[self.answers.choice(prompt * len(mine) + rank, self._text_only(choice), choice.reason) for rank, choice in enumerate(mine)],
            prompt_tokens=tokens,
            samples=[RecordedSample(choice.tokens, choice.logprobs, choice.reason) for choice in mine],
            seed=prepared.seed_of(prompt),
            started_us=prepared.created_us,
            duration_us=now_us() - prepared.created_us,
            ttft_us=None if self._first_token_us is None else self._first_token_us - prepared.created_us,
            status=self._status,
            error_code=self._error_code,
            cached_tokens=self._streams[prompt].found_tokens,
            unpaid_tokens=len(tokens) if self._was_refused(prompt) else 0,
            unanswered_tokens=_tokens_of(self._drawn(prompt)) - _tokens_of(mine),
            consent=prepared.consent,
            episode_id=prepared.episode,
            parent_id=None if prompt == 0 else prepared.id,
            tags=metadata if prepared.asked.user is None else {"user": prepared.asked.user, **metadata},
        )

    def _text_only(self, choice: Choice) -> Piece:
        return Piece("".join(piece.text for piece in self._texts[choice.index]), [])


def _tokens_of(choices: Sequence[Choice]) -> int:
    return sum(len(choice.tokens) for choice in choices)


async def _merged(streams: Sequence[SampleStream]) -> AsyncGenerator[tuple[int, Progress], None]:
    """Events of all streams as they come, with the number of their stream; leaving closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Progress] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def forward(number: int, stream: SampleStream) -> None:
        # The error of one stream ends the request, and belongs to whoever reads the queue.
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((number, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        await background.stop(*tasks)
