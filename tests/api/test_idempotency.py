"""The layer that repeats answers, around an app of a few lines: what it holds has bounds, and nobody loses by what others ask."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from bloomery.api.headers import AnswerHeaders
from bloomery.api.idempotency import Idempotent
from bloomery.services.access.principal import Principal

MOST = 1 << 20
PATH = "/v1/completions"


class Echo:
    """Answers with the body that it got, as often as it is asked; `fails` so many times first, and holds its answers while `gate` is closed."""

    def __init__(self, fails: int = 0) -> None:
        self.bodies: list[bytes] = []
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        self.bodies.append(body)
        await self.gate.wait()
        self.fails -= 1
        await send({"type": "http.response.start", "status": 200 if self.fails < 0 else 500, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Stand:
    """The layer over an echo, asked by keys of projects."""

    def __init__(self, echo: Echo, **bounds: int) -> None:
        self.echo, self.layer = echo, Idempotent(echo, MOST, lambda caller: {"x-ratelimit-of": caller.key_id}, **bounds)

    async def ask(self, key: str, body: bytes = b"x", caller: str = "project/key", query: str = "", **headers: str) -> httpx.Response:
        project, key_id = caller.split("/")
        principal = Principal(project, key_id, frozenset({"infer"}))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.layer({**scope, "state": {"caller": principal}}, receive, send)

        transport = httpx.ASGITransport(AnswerHeaders(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(PATH + query, content=body, headers={"idempotency-key": key} | headers)

    async def is_kept(self, key: str, body: bytes = b"x", caller: str = "project/key") -> bool:
        asked = len(self.echo.bodies)
        await self.ask(key, body, caller)
        return len(self.echo.bodies) == asked


def play(story: Callable[[Stand], Awaitable[None]], *, fails: int = 0, **bounds: int) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story(Stand(Echo(fails), **bounds))

    asyncio.run(run())


def test_headers_of_ours_belong_to_what_was_asked_and_those_of_others_do_not() -> None:
    async def story(stand: Stand) -> None:
        assert (await stand.ask("a", **{"x-bloomery-consent": "train"})).status_code == 200
        again = await stand.ask("a", **{"x-bloomery-consent": "train", "user-agent": "another"})
        assert again.headers["idempotent-replayed"] == "true"
        for changed in ({"x-bloomery-consent": "none"}, {}, {"x-bloomery-consent": "train", "x-bloomery-episode": "e"}):
            refused = await stand.ask("a", **changed)
            assert refused.status_code == 409
            assert "`x-bloomery-` headers" in refused.json()["error"]["message"]
        assert len(stand.echo.bodies) == 1

    play(story)


def test_a_query_belongs_to_what_was_asked() -> None:
    async def story(stand: Stand) -> None:
        assert (await stand.ask("a", query="?beta=true")).status_code == 200
        assert (await stand.ask("a", query="?beta=true")).headers["idempotent-replayed"] == "true"
        for other in ("", "?beta=false", "?beta=true&more"):
            assert (await stand.ask("a", query=other)).status_code == 409
        assert len(stand.echo.bodies) == 1

    play(story)


def test_repetitions_and_what_is_refused_here_say_where_the_key_stands() -> None:
    async def story(stand: Stand) -> None:
        assert "x-ratelimit-of" not in (await stand.ask("a")).headers
        for answer in (await stand.ask("a"), await stand.ask("a", b"another"), await stand.ask("k" * 256)):
            assert answer.headers["x-ratelimit-of"] == "key"

    play(story)


def test_who_is_answered_much_drives_out_none_of_the_answers_of_others() -> None:
    async def story(stand: Stand) -> None:
        await stand.ask("small", caller="modest/key")
        await stand.ask("small", caller="greedy/modest")
        for number in range(30):
            await stand.ask(f"large-{number}", b"x" * 10_000, caller="greedy/greedy")
        assert await stand.is_kept("small", caller="modest/key")
        assert await stand.is_kept("small", caller="greedy/modest")
        assert await stand.is_kept("large-29", b"x" * 10_000, caller="greedy/greedy")
        assert not await stand.is_kept("large-0", b"x" * 10_000, caller="greedy/greedy")

    play(story, kept_bytes=100_000)


def test_many_keys_of_one_project_are_one_owner_to_the_others() -> None:
    async def story(stand: Stand) -> None:
        await stand.ask("mine", b"x" * 20_000, caller="modest/key")
        for number in range(30):
            await stand.ask("theirs", b"x" * 9_000, caller=f"greedy/key-{number}")
        assert await stand.is_kept("mine", b"x" * 20_000, caller="modest/key")

    play(story, kept_bytes=100_000)


def test_repetitions_that_wait_hold_no_more_than_there_is_room_for() -> None:
    async def story(stand: Stand) -> None:
        stand.echo.gate.clear()
        body = b"x" * 1000
        first = asyncio.create_task(stand.ask("a", body))
        await until(lambda: len(stand.echo.bodies) == 1)
        others = [asyncio.create_task(stand.ask("a", body)) for _ in range(5)]
        await until(lambda: stand.layer._waiting_bytes > 0)
        await settled()
        assert stand.layer._waiting_bytes == 2000
        stand.echo.gate.set()
        assert (await first).status_code == 500
        # Two hold what they have sent, and take the place of the first in turn. Nobody is served without his body.
        answers = [await other for other in others]
        assert sorted(answer.status_code for answer in answers) == [500, 500, 503, 503, 503]
        assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 503)
        assert stand.echo.bodies == [body] * 3
        assert stand.layer._waiting_bytes == 0

    play(story, fails=9, waiting_bytes=2500)


def test_a_repetition_without_room_still_gets_the_answer_of_the_first() -> None:
    async def story(stand: Stand) -> None:
        stand.echo.gate.clear()
        first, second = (asyncio.create_task(stand.ask("a")) for _ in range(2))
        await settled()
        stand.echo.gate.set()
        answers = [await first, await second]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(stand.echo.bodies) == 1

    play(story, waiting_bytes=0)


def test_who_hangs_up_while_he_waits_waits_no_longer() -> None:
    async def story(stand: Stand) -> None:
        stand.echo.gate.clear()
        first = asyncio.create_task(stand.ask("a"))
        await until(lambda: len(stand.echo.bodies) == 1)
        sent: list[Message] = []
        messages: list[Message] = [{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        await stand.layer(scope("a"), receive, send)
        assert (sent, stand.layer._waiting_bytes) == ([], 0)
        stand.echo.gate.set()
        assert (await first).status_code == 200
        assert len(stand.echo.bodies) == 1

    play(story)


def scope(key: str) -> dict[str, Any]:
    principal = Principal("project", "key", frozenset({"infer"}))
    headers = [(b"idempotency-key", key.encode())]
    return {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers, "state": {"caller": principal}}


async def settled() -> None:
    """Until every task stands where only others can take it further."""
    for _ in range(100):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0)
