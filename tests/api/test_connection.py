"""Connections of clients who send too much, too slowly or not at all, take nothing, or leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from bloomery.api.connection import MAX_HEAD_BYTES, Connection

POST = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 5\r\n\r\n"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Client(NamedTuple):
    """Its end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, data: bytes) -> None:
        """Send, unless nobody listens any more."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def hear(self) -> bytes:
        """All until the server hangs up."""
        heard = b""
        with suppress(ConnectionError):
            while part := await self.reader.read(1 << 16):
                heard += part
        return heard


@asynccontextmanager
async def connected(app: App, **changed: Any) -> AsyncIterator[Client]:
    kind = type("Hurried", (Connection,), changed)
    config, state = Config(app, log_config=None, access_log=False, lifespan="off", ws="none"), ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
    async with server:
        client = Client(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        try:
            yield client
        finally:
            client.writer.close()
            await asyncio.gather(*state.tasks)


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(run())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await answer(send, body)


async def answer(send: Send, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("part", [b"x", b"x: y\r\nz: "], ids=["one header", "many headers"])
def test_a_head_without_an_end_is_refused_before_it_takes_much_memory(part: bytes) -> None:
    async def story() -> None:
        async with connected(echo) as client:
            saying = asyncio.create_task(endless(client, part))
            assert (await client.hear()).startswith(b"HTTP/1.1 431 ")
            saying.cancel()

    async def endless(client: Client, part: bytes) -> None:
        await client.say(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(MAX_HEAD_BYTES):
            await client.say(part * 100)
            await asyncio.sleep(0)

    play(story)


def test_a_whole_head_is_taken_up_to_its_bound_and_refused_beyond() -> None:
    async def story(over: int, status: bytes) -> None:
        async with connected(echo) as client:
            # The path, and the two headers with their names.
            room = MAX_HEAD_BYTES - len("/") - len("x") - len("connectionclose")
            await client.say(b"GET / HTTP/1.1\r\nconnection: close\r\nx: " + b"y" * (room + over) + b"\r\n\r\n")
            assert (await client.hear()).startswith(b"HTTP/1.1 " + status)

    play(lambda: story(0, b"200 "))
    play(lambda: story(1, b"431 "))


def test_a_head_has_to_be_whole_in_time_however_steadily_it_comes() -> None:
    async def story() -> None:
        async with connected(echo, head_s=0.2) as client:
            trickling = asyncio.create_task(trickle(client))
            assert (await client.hear()).startswith(b"HTTP/1.1 408 ")
            trickling.cancel()
        async with connected(echo, head_s=0.2) as client:
            assert await client.hear() == b""

    async def trickle(client: Client) -> None:
        await client.say(b"GET / HTTP/1.1\r\nx: ")
        while True:
            await client.say(b"y")
            await asyncio.sleep(0)

    play(story)


def test_who_works_on_a_body_that_stopped_coming_hears_that_its_client_is_gone_and_the_client_why() -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive)
        heard.append("gone")

    async def story() -> None:
        async with connected(app, silent_s=0.2) as client:
            await client.say(POST + b"abc")
            assert (await client.hear()).startswith(b"HTTP/1.1 408 ")
        assert heard == ["gone"]

    play(story)


def test_a_slow_answer_keeps_its_connection_and_the_next_request_is_read() -> None:
    late = asyncio.Event()

    def note(connection: Connection) -> None:
        late.set()
        Connection._head_late(connection)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await late.wait()
        await echo(scope, receive, send)

    async def story() -> None:
        async with connected(app, head_s=0.2, _head_late=note) as client:
            await client.say(POST + b"first" + POST[:-2])
            assert (await client.reader.readuntil(b"first")).startswith(b"HTTP/1.1 200 ")
            await client.say(b"\r\n" + b"again")
            assert (await client.reader.readuntil(b"again")).startswith(b"HTTP/1.1 200 ")

    play(story)


def test_who_sends_two_requests_and_leaves_has_the_work_on_the_first_stopped() -> None:
    begun, ended = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await until_gone(receive)
        ended.append("gone")

    async def story() -> None:
        async with connected(app) as client:
            await client.say((POST + b"hello") * 2)
            await begun.wait()
        assert ended == ["gone"]

    play(story)


def test_a_body_behind_an_offer_of_another_protocol_is_read_and_so_is_the_next_request() -> None:
    offer = POST.replace(b"host: here", b"host: here\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk")

    async def story(parts: list[bytes]) -> None:
        async with connected(echo) as client:
            for part in parts:
                await client.say(part)
                await asyncio.sleep(0)
            assert (await client.reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
            await client.say(POST + b"again")
            assert (await client.reader.readuntil(b"again")).startswith(b"HTTP/1.1 200 ")

    play(lambda: story([offer + b"hello"]))
    play(lambda: story([offer, b"hello"]))
    play(lambda: story([offer[:40], offer[40:], b"he", b"llo"]))


def test_an_answer_that_nobody_takes_ends() -> None:
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(until_gone(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
            await asyncio.sleep(0)
        ended.append("gone")

    async def story() -> None:
        async with connected(app, silent_s=0.2) as client:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await client.say(POST + b"hello")
            while not ended:
                await asyncio.sleep(0)

    play(story)
