"""One sampling request while it is worked on: its events are gathered for its future, and it leaves a record however it ends."""

from contextlib import aclosing
from dataclasses import replace

from bloomery.api.routes.tinker.futures import SampleAnswer
from bloomery.api.routes.tinker.gather import Gathering
from bloomery.api.routes.tinker.messages import PromptOut, encode_sample
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.services.data.span_rows import Inference, RecordedSample
from bloomery.services.serving.sampling import ProgressTogether, SampleStream
from bloomery.types.errors import code_of
from bloomery.types.generation import FinishReason, SampledToken, SampleFinished
from bloomery.types.ids import now_us
from bloomery.types.kept import KeptTokens
from bloomery.types.traffic import SpanStatus


class Rollout:
    """`known` is what can be recorded before anything is sampled, `prompt` what is to be told of the prompt."""

    def __init__(
        self,
        services: Services,
        caller: Principal,
        stream: SampleStream,
        gathering: Gathering,
        known: Inference,
        prompt: PromptOut,
        *,
        drafted: int | None = None,
    ) -> None:
        """`drafted`: tokens of drafts, which were paid for like those of the prompt; None without any, and then it is not told how many were kept."""
        self._traffic, self._limits, self._caller = services.traffic, services.limits, caller
        self._stream, self._gathering, self._known, self._prompt = stream, gathering, known, prompt
        self._drafted, self._begun = drafted, False
        """Whether something came of the prompt."""
        self._reasons: dict[int, FinishReason] = {}
        self._first_token_us: int | None = None
        self._status: SpanStatus = "cancelled"
        self._error_code: str | None = None

    async def answer(self) -> SampleAnswer:
        """Sample to the end."""
        try:
            await self._gather()
            self._status = "ok"
        except Exception as error:
            self._status, self._error_code = "error", code_of(error)
            raise
        finally:
            self._charge()
            self._traffic.record(self._inference())
        prompt = self._prompt._replace(scored=self._gathering.scored, found=self._stream.found_tokens)
        kept = None if self._drafted is None else self._gathering.kept()
        body = encode_sample(self._gathering.samples(), prompt)
        return SampleAnswer(body, self._known.target.weights.version, self._gathering.mode, kept)

    async def _gather(self) -> None:
        """A sample whose stop string came is aborted; its siblings go on."""
        async with aclosing(self._stream):
            async for event in self._stream.together:
                self._begun = True
                stopped = self._gathering.take(event)
                self._note(event, stopped)
                if self._gathering.complete:
                    break
                if stopped is not None:
                    self._stream.abort(stopped)

    def _charge(self) -> None:
        """The key pays for what was sampled, and not for a prompt that was refused before anything came of it."""
        if self._status == "error" and not self._begun:
            self._limits.give_back(self._caller, len(self._known.prompt_tokens) + (self._drafted or 0))
        self._limits.sampled(self._caller, sum(len(out.tokens) for out in self._gathering.samples()))

    def _note(self, event: ProgressTogether, stopped: int | None) -> None:
        if stopped is not None:
            self._reasons[stopped] = "stop"
        if isinstance(event, SampledToken | KeptTokens):
            self._first_token_us = self._first_token_us or now_us()
        elif isinstance(event, SampleFinished):
            self._reasons.setdefault(event.sample, event.reason)

    def _inference(self) -> Inference:
        started_us = self._known.started_us
        samples = [RecordedSample(out.tokens, out.logprobs, self._reasons.get(index)) for index, out in enumerate(self._gathering.samples())]
        return replace(
            self._known,
            samples=samples,
            duration_us=now_us() - started_us,
            ttft_us=None if self._first_token_us is None else self._first_token_us - started_us,
            status=self._status,
            error_code=self._error_code,
            cached_tokens=self._stream.found_tokens,
        )
