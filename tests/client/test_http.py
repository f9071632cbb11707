"""Requests survive a server that goes away, are not repeated where that would do harm, and errors arrive as what they are."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.client import Client
from bloomery.client.client import Keys
from bloomery.client.http import Http
from bloomery.types import errors
from bloomery.types.errors import (
    BloomeryError,
    Conflict,
    Deadly,
    InvalidInput,
    InvalidToken,
    NotFound,
    NotSupported,
    RateLimited,
    Unavailable,
    WorkerError,
)

Answer = httpx.Response | Exception


class Server(httpx.BaseTransport):
    """Answers from a list, the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.seen: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(f"{request.method} {request.url.path}")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def http(server: httpx.BaseTransport, patience_s: float = 60.0) -> Http:
    return Http("http://server", "tml-key", transport=server, timeout_s=5, patience_s=patience_s)


def ok() -> httpx.Response:
    return httpx.Response(200, json={"fine": True})


@pytest.mark.parametrize("trouble", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.Response(503, json={})])
def test_a_repeatable_request_is_repeated_until_the_server_is_back(trouble: Answer) -> None:
    server = Server(trouble, ok())
    assert http(server).post("/x", {}, repeatable=True) == {"fine": True}
    assert server.seen == ["POST /x", "POST /x"]


def test_other_requests_are_repeated_only_while_certainly_not_taken_up() -> None:
    assert http(Server(httpx.ConnectError("refused"), ok())).post("/x", {}) == {"fine": True}
    lost = Server(httpx.ReadError("reset"), ok())
    with pytest.raises(Unavailable, match="ReadError: reset"):
        http(lost).post("/x", {})
    assert lost.seen == ["POST /x"]


def test_revoking_is_not_repeated_for_the_name_may_be_another_keys_by_then() -> None:
    lost = Server(httpx.ReadError("reset"), ok())
    with pytest.raises(Unavailable, match="ReadError: reset"):
        Keys(http(lost)).revoke("app")
    assert lost.seen == ["DELETE /api/v1/keys/app"]


def test_only_a_paced_request_waits_until_there_is_room() -> None:
    full = httpx.Response(429, json={"error": "full", "category": "server", "code": "unavailable", "field": None})
    assert http(Server(full, ok())).request("POST", "/x", paced=True).json() == {"fine": True}
    with pytest.raises(Unavailable, match="full"):
        http(Server(full, ok())).request("POST", "/x")


def test_a_status_may_be_an_answer() -> None:
    later = Server(httpx.Response(408, json={}))
    assert http(later).request("POST", "/x", also=(408,)).status_code == 408
    with pytest.raises(InvalidInput):
        http(later).request("POST", "/x")


def test_patience_ends() -> None:
    with pytest.raises(Unavailable, match="refused"):
        http(Server(httpx.ConnectError("refused")), patience_s=0.1).get("/x")


@pytest.mark.parametrize(
    ("response", "kind", "field"),
    [
        (httpx.Response(400, json={"error": {"code": "invalid", "message": "m", "field": "rank"}}), InvalidInput, "rank"),
        (httpx.Response(404, json={"error": {"code": "model_not_found", "message": "m", "param": "model", "type": "t"}}), NotFound, "model"),
        (httpx.Response(409, json={"error": {"code": "conflict", "message": "m", "field": None}}), Conflict, None),
        (httpx.Response(500, json={"error": {"code": "worker", "message": "m", "field": None}}), WorkerError, None),
        (httpx.Response(502, text="<html>bad gateway"), WorkerError, None),
        (httpx.Response(413, json=["not an envelope"]), InvalidInput, None),
        (httpx.Response(400, json={"error": "m", "category": "user", "code": "not_supported", "field": "prompt"}), NotSupported, "prompt"),
        (httpx.Response(429, json={"error": "m", "category": "user", "code": "rate_limit_exceeded", "field": None}), RateLimited, None),
    ],
)
def test_errors_are_those_of_the_server(response: httpx.Response, kind: type[BloomeryError], field: str | None) -> None:
    with pytest.raises(kind) as raised:
        http(Server(response)).get("/x")
    assert type(raised.value) is kind
    assert raised.value.field == field


def test_every_error_that_has_a_code_of_its_own_comes_back_as_itself() -> None:
    own = [kind for kind in below(BloomeryError) if "code" in vars(kind)]
    assert len(own) > 10
    for kind in own:
        for envelope in ({"error": {"code": kind.code, "message": "m", "field": "f"}}, {"error": "m", "code": kind.code, "field": "f"}):
            with pytest.raises(kind) as raised:
                http(Server(httpx.Response(400, json=envelope))).get("/x")
            assert (type(raised.value), raised.value.message, raised.value.field) == (kind, "m", "f")


def test_an_error_with_the_code_of_its_parent_comes_back_as_the_parent() -> None:
    shared = [kind for kind in below(BloomeryError) if "code" not in vars(kind)]
    assert {Deadly, InvalidToken} <= set(shared)
    for kind in shared:
        assert errors.BY_CODE[kind.code] in kind.__mro__[1:]


def below(kind: type[BloomeryError]) -> list[type[BloomeryError]]:
    """Those of `types/errors.py`, of whatever depth."""
    return [each for child in kind.__subclasses__() if child.__module__ == errors.__name__ for each in (child, *below(child))]


def test_a_stream_is_split_at_newlines_only() -> None:
    text = 'data: {"a": "one\u2028two"}\n\n: comment\n\ndata: [DONE]\n\n'
    with http(Server(httpx.Response(200, content=text.encode()))).stream("/x", {}) as lines:
        assert list(lines) == ['{"a": "one\u2028two"}', "[DONE]"]


def test_a_refused_stream_raises_its_error() -> None:
    refused = Server(httpx.Response(400, json={"error": {"code": "invalid", "message": "m", "param": "top_p"}}))
    with pytest.raises(InvalidInput), http(refused).stream("/x", {}) as lines:
        list(lines)


class Breaking(httpx.SyncByteStream):
    """The connection is lost behind this, or something else happens."""

    def __init__(self, content: bytes, trouble: BaseException | None = None) -> None:
        self._content, self._trouble = content, trouble or httpx.ReadError("reset")

    def __iter__(self) -> Iterator[bytes]:
        yield self._content
        raise self._trouble


@pytest.mark.parametrize("trouble", [httpx.ConnectError("refused"), httpx.Response(200, stream=Breaking(b'data: {"choices": []}\n\n'))])
def test_a_stream_whose_connection_is_lost_is_unavailable(trouble: Answer) -> None:
    server = Server(trouble)
    with pytest.raises(Unavailable, match=r"POST http://server/v1/chat/completions: (ConnectError: refused|ReadError: reset)"):
        list(Client("http://server", "tml-key", transport=server).chat_stream("tiny", []))
    assert len(server.seen) == 1


@pytest.mark.parametrize(("code", "kind"), [("unavailable", Unavailable), ("invalid", InvalidInput), ("internal", WorkerError)])
def test_an_error_in_a_stream_is_raised_as_what_it_is(code: str, kind: type[BloomeryError]) -> None:
    told = json.dumps({"error": {"message": "m", "type": "t", "param": "prompt", "code": code}})
    client = Client("http://server", "tml-key", transport=Server(httpx.Response(200, text=f"data: {told}\n\n")))
    with pytest.raises(kind) as raised:
        list(client.chat_stream("tiny", []))
    assert (type(raised.value), raised.value.message, raised.value.field) == (kind, "m", "prompt")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(200, stream=Breaking(b"half of it")), Unavailable),
        (httpx.Response(200, stream=Breaking(b"half of it", KeyboardInterrupt())), KeyboardInterrupt),
        (httpx.Response(404, json={"error": {"code": "not_found", "message": "m"}}), NotFound),
        (httpx.ConnectError("refused"), Unavailable),
    ],
)
def test_a_broken_download_leaves_no_file_and_can_be_tried_again(answer: Answer, error: type[BaseException], tmp_path: Path) -> None:
    client = http(Server(answer, httpx.Response(200, stream=httpx.ByteStream(b"all of it"))))
    with pytest.raises(error):
        client.download("/x", tmp_path / "x")
    assert not [*tmp_path.iterdir()]
    client.download("/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"all of it"
    with pytest.raises(FileExistsError):
        client.download("/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"all of it"


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_download_that_finds_no_room_leaves_no_file(size: int, tmp_path: Path) -> None:
    """What is small is written when the file is closed."""
    client, (soft, hard) = http(Server(httpx.Response(200, stream=httpx.ByteStream(bytes(size))))), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            client.download("/x", tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_queries_leave_out_what_is_not_given() -> None:
    urls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        urls.append(str(request.url))
        return ok()

    look: Callable[..., Any] = http(httpx.MockTransport(answer)).get
    look("/x", deployment=None, limit=5)
    assert urls == ["http://server/x?limit=5"]
