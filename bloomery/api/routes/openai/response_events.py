"""A chat completion as a response: its output items, and the events of a streamed one.

Events come in OpenAI's order: created, in progress; for each item added, its parts and their pieces, done; at last completed, incomplete or failed.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from bloomery.api.routes.openai.response_words import InOtherWords
from bloomery.api.routes.openai.serving import Serving
from bloomery.api.routes.openai.times import unix_s
from bloomery.types.errors import BloomeryError
from bloomery.types.ids import new_id, now_us

Json = dict[str, Any]


class ResponseEvents:
    """The events of one response, numbered from 0; what goes wrong is in the words of its caller."""

    def __init__(self, serving: Serving, asked: Mapping[str, Any], said: InOtherWords) -> None:
        self._serving, self._asked, self._said = serving, asked, said
        self._number = 0
        self._items: list[Json] = []
        """Those that are done."""
        self._open: _OpenMessage | _OpenCall | None = None
        self._held: list[Json] = []
        """Log-probabilities of tokens whose text is held back: it may become a call."""
        self._reason: str | None = None

    async def whole(self) -> Json:
        """Serve to the end and answer in one piece, which is what a stream ends with."""
        async with aclosing(self.stream()) as pieces:
            async for events in pieces:
                last = events[-1]
        response: Json = last["response"]
        return response

    async def stream(self) -> AsyncGenerator[list[Json], None]:
        """Serve piece by piece; the first events come with the first piece."""
        with self._said.telling():
            async with aclosing(self._serving.chunks()) as pieces:
                async for chunks in pieces:
                    if events := [event for chunk in chunks for event in self._tell(chunk)]:
                        yield events
        yield list(self._end())

    def failed(self, error: BloomeryError) -> Json:
        """The last event of a response that broke off."""
        code = "server_error" if error.category == "server" else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def _tell(self, chunk: Json) -> Iterator[Json]:
        if self._number == 0:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for choice in chunk["choices"]:
            yield from self._take(choice)

    def _take(self, choice: Json) -> Iterator[Json]:
        delta = choice["delta"]
        tokens = _logprobs(choice.get("logprobs"))
        self._held += tokens
        if delta.get("content"):
            if not isinstance(self._open, _OpenMessage):
                yield from self._begin(_OpenMessage(new_id("msg"), len(self._items) + (self._open is not None)))
            yield from self._text(delta["content"], self._take_held())
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)
        self._reason = choice["finish_reason"] or self._reason

    def _begin(self, item: "_OpenMessage | _OpenCall") -> Iterator[Json]:
        yield from self._close("completed")
        self._open = item
        yield self._event("response.output_item.added", output_index=item.index, item=item.shape("in_progress"))
        if isinstance(item, _OpenMessage):
            yield self._event("response.content_part.added", **item.place, part=_text_part("", []))

    def _text(self, text: str, tokens: list[Json]) -> Iterator[Json]:
        assert isinstance(self._open, _OpenMessage)
        self._open.text += text
        self._open.tokens += tokens
        yield self._event("response.output_text.delta", **self._open.place, delta=text, logprobs=tokens)

    def _call(self, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if not isinstance(self._open, _OpenCall) or self._open.number != call["index"]:
            index = len(self._items) + (self._open is not None)
            yield from self._begin(_OpenCall(new_id("fc"), index, call["index"], call["id"], function["name"]))
        # They spell the call: no text.
        self._take_held()
        assert isinstance(self._open, _OpenCall)
        if arguments := function.get("arguments"):
            self._open.arguments += arguments
            yield self._event("response.function_call_arguments.delta", **self._open.place, delta=arguments)

    def _take_held(self) -> list[Json]:
        held, self._held = self._held, []
        return held

    def _close(self, status: str) -> Iterator[Json]:
        item, self._open = self._open, None
        if item is None:
            return
        shape = item.shape(status)
        self._items.append(shape)
        if isinstance(item, _OpenMessage):
            yield self._event("response.output_text.done", **item.place, text=item.text, logprobs=item.tokens)
            yield self._event("response.content_part.done", **item.place, part=shape["content"][0])
        else:
            yield self._event("response.function_call_arguments.done", **item.place, name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", output_index=item.index, item=shape)

    def _end(self) -> Iterator[Json]:
        status = _status(self._reason)
        if self._open is None and not self._items:
            yield from self._begin(_OpenMessage(new_id("msg"), 0))
        if isinstance(self._open, _OpenMessage) and (held := self._take_held()):
            yield from self._text("", held)
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status) | {"usage": _usage(self._serving.usage.shape())})

    def _response(self, status: str) -> Json:
        return _response(self._serving, self._asked, status, list(self._items))

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


class _OpenMessage:
    """A message that is being written."""

    def __init__(self, item_id: str, index: int) -> None:
        self.item_id, self.index = item_id, index
        self.text = ""
        self.tokens: list[Json] = []

    @property
    def place(self) -> Json:
        """Where its text belongs."""
        return {"item_id": self.item_id, "output_index": self.index, "content_index": 0}

    def shape(self, status: str) -> Json:
        """As an item."""
        return _message_item(self.item_id, status, [] if status == "in_progress" else [_text_part(self.text, self.tokens)])


class _OpenCall:
    """A call that is being written; `number` is its place among the calls."""

    def __init__(self, item_id: str, index: int, number: int, call_id: str, name: str) -> None:
        self.item_id, self.index, self.number, self.call_id, self.name = item_id, index, number, call_id, name
        self.arguments = ""

    @property
    def place(self) -> Json:
        """Where its arguments belong."""
        return {"item_id": self.item_id, "output_index": self.index}

    def shape(self, status: str) -> Json:
        """As an item."""
        return _call_item(self.item_id, self.call_id, self.name, self.arguments, status)


def _response(serving: Serving, asked: Mapping[str, Any], status: str, items: list[Json]) -> Json:
    prepared = serving.prepared
    ended = unix_s(now_us()) if status == "completed" else None
    return {
        "id": prepared.id,
        "object": "response",
        "created_at": unix_s(prepared.created_us),
        "completed_at": ended,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.get("instructions"),
        "logprobs_mode": None if prepared.top_logprobs is None else prepared.logprobs_mode,
        "max_output_tokens": asked.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": asked.get("metadata") or {},
        "model": prepared.target.display,
        "output": items,
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": bool(asked.get("store")),
        "system_fingerprint": prepared.target.weights.version,
        "temperature": 1.0 if asked.get("temperature") is None else asked["temperature"],
        "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_logprobs": asked.get("top_logprobs") or 0,
        "top_p": 1.0 if asked.get("top_p") is None else asked["top_p"],
        "truncation": "disabled",
        "usage": None,
        "user": asked.get("user"),
    }


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message_item(item_id: str, status: str, content: list[Json]) -> Json:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, tokens: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}


def _call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Json:
    return {"id": item_id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, "status": status}


def _logprobs(logprobs: Json | None) -> list[Json]:
    return [] if logprobs is None else logprobs["content"]
