"""The real app on a real port, with an engine that says what a test wants to hear."""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import uvicorn
from openai import OpenAI

from bloomery.types import protocol
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, GenerateFailed, PromptEmbedded, PromptFound, PromptScored, SampledToken, SampleFinished, SamplerEvent
from bloomery.types.protocol import FromEngine, SamplerEvents, Welcome
from tests.api.server import KEY, Server
from tests.live import wait_until
from tests.render.builders import byte_level
from tests.services.fake_engine import FakeEngine

END = byte_level().token_to_id("<|im_end|>")
CONTEXT = 512
OTHER_TOKEN = 50
PROCESSED_LOGPROB = -0.25
"""Of every token of an answer, in the distribution that it is said to be drawn from."""

RANK = 7
"""Of every token of a prompt."""


def logprob_at(position: int) -> float:
    """Of every token at this position of an answer or a prompt."""
    return -(position + 1) / 8


@dataclass
class Script:
    """What the engine does with the next requests."""

    says: Sequence[str] = ("It is 36.",)
    """One answer for each sample, from the first again when there are more samples."""
    stall_after: int | None = None
    """Go silent after so many tokens."""
    fail_after: int | None = None
    """Give the request up after so many tokens."""
    abort_after: int | None = None
    """End a sample with `abort` after so many tokens."""
    refuses: str | None = None
    """The field of every request that is at fault."""
    refuses_about: int | None = None
    """The first token of the prompts that are refused; None: of all."""
    dies: bool = False
    """Of every request, before its first token."""
    together: bool = False
    """All events of a request in one frame."""
    silent_about: int | None = None
    """The first token of the prompts of which nothing is said."""
    mute: Sequence[int] = ()
    """Samples that nothing is said of."""


class ScriptedEngine(FakeEngine):
    """Each token of an answer arrives in a frame of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.script = Script()
        self.requests: list[Generate] = []

    def _post(self, message: FromEngine) -> None:
        if isinstance(message, Welcome):
            base = msgspec.structs.replace(message.base, vocab_size=byte_level().get_vocab_size(), context=CONTEXT)
            message = msgspec.structs.replace(message, base=base)
        super()._post(message)

    def _take(self, message: protocol.ToEngine) -> None:
        if isinstance(message, Generate):
            self.requests.append(message)
        super()._take(message)

    def _sample(self, request: Generate) -> None:
        if self.script.dies:
            self.hang_up()
            return
        if self.script.silent_about is not None and request.prompt.numpy()[0] == self.script.silent_about:
            return
        if (field := self.script.refuses) is not None and self.script.refuses_about in (None, request.prompt.numpy()[0]):
            self._tell(GenerateFailed(request_id=request.request_id, message=f"`{field}` is too much", category="user", field=field))
            return
        if self.found_tokens:
            self._tell(PromptFound(request_id=request.request_id, tokens=self.found_tokens))
        if request.embed:
            self._tell(PromptEmbedded(request_id=request.request_id, vector=Array.of(np.arange(1, 9, dtype=np.float32))))
            self._tell(SampleFinished(request_id=request.request_id, sample=0, reason="length"))
            return
        if request.prompt_logprobs:
            self._tell(_scored(request))
        if request.params.max_tokens == 0:
            self._tell(SampleFinished(request_id=request.request_id, sample=0, reason="length"))
            return
        told = [event for sample in range(request.num_samples) if sample not in self.script.mute for event in self._answer(request, sample)]
        if self.script.together:
            self._tell(*told)
        else:
            for event in told:
                self._tell(event)

    def _answer(self, request: Generate, sample: int) -> Iterator[SamplerEvent]:
        text = self.script.says[sample % len(self.script.says)]
        tokens = [*byte_level().encode(text, add_special_tokens=False).ids, END][: request.params.max_tokens]
        for position, token in enumerate(tokens):
            if position == self.script.stall_after:
                return
            if position == self.script.abort_after:
                yield SampleFinished(request_id=request.request_id, sample=sample, reason="abort")
                return
            if position == self.script.fail_after:
                yield GenerateFailed(request_id=request.request_id, message="the weights melted", category="server")
                return
            own, drawn_from = (
                ((token, logprob), (OTHER_TOKEN, float("-inf")))[: request.top_logprobs] for logprob in (logprob_at(position), PROCESSED_LOGPROB)
            )
            yield SampledToken(
                request_id=request.request_id,
                sample=sample,
                position=position,
                token=token,
                logprob=logprob_at(position),
                top=own,
                processed_logprob=PROCESSED_LOGPROB,
                processed_top=drawn_from,
            )
        reason = "stop" if tokens[-1] == END else "length"
        yield SampleFinished(request_id=request.request_id, sample=sample, reason=reason)

    def _tell(self, *events: SamplerEvent) -> None:
        super()._post(SamplerEvents(events=events))


def _scored(request: Generate) -> PromptScored:
    prompt = request.prompt.numpy()
    logprobs = np.array([np.nan, *map(logprob_at, range(1, len(prompt)))], np.float32)
    ids = np.stack([prompt, np.full_like(prompt, OTHER_TOKEN)], axis=1)[:, : request.prompt_top_k].astype(np.int32)
    values = np.stack([logprobs, logprobs - 1], axis=1)[:, : request.prompt_top_k]
    top = {"top_ids": Array.of(ids), "top_logprobs": Array.of(values)} if request.prompt_top_k else {}
    if request.prompt_ranks:
        top["ranks"] = Array.of(np.full(len(prompt), RANK, np.int32))
    return PromptScored(request_id=request.request_id, logprobs=Array.of(logprobs), **top)


class ScriptedServer(Server):
    """`url` is where it listens."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "full")
        self.scripted = self.engine = ScriptedEngine(self.engine.socket, self.engine.blobs)

    def span(self, span_id: str) -> dict[str, Any]:
        """What was recorded: the span, its body and its feedback."""
        answer = self.http.get(f"/api/v1/spans/{span_id}")
        assert answer.status_code == 200, answer.text
        detail: dict[str, Any] = answer.json()
        return detail

    @contextmanager
    def asking(self, path: str, body: Mapping[str, Any], **headers: str) -> Iterator[None]:
        """A request that waits for its answer, whose sender hangs up at the end; the engine has it, and its tokens came, when this begins."""
        where, content, asked = urlsplit(self.url), httpx.Request("POST", self.url, json=body).content, len(self.scripted.requests)
        lines = {"host": "x", "x-api-key": KEY, "content-type": "application/json", "content-length": str(len(content)), **headers}
        with socket.create_connection((where.hostname, where.port), timeout=60) as sock:
            sock.sendall("\r\n".join([f"POST {path} HTTP/1.1", *map(": ".join, lines.items()), "", ""]).encode() + content)
            wait_until(lambda: len(self.scripted.requests) > asked)
            # The loop is that of the engine too: whatever it was about to say was heard before it has answered this.
            for _ in range(3):
                assert self.http.get("/api/v1/status").status_code == 200
            yield

    def sdk(self, **options: Any) -> OpenAI:
        """The unmodified client."""
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0} | options)

    @contextmanager
    def listening(self) -> Iterator["ScriptedServer"]:
        with self.running():
            assert self.app is not None
            server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="warning", timeout_graceful_shutdown=1))
            serving = asyncio.run_coroutine_threadsafe(server.serve(), self._loop)
            self.call(_until_started(server))
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                server.should_exit = True
                serving.result(120)


async def _until_started(server: uvicorn.Server) -> None:
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
