"""The OpenAPI document is made once, by a thread, and others are served meanwhile."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bloomery.api import app
from tests.api.server import KEY, Server, serving

PATH = "/api/v1/openapi.json"
FEW_TURNS = 100
"""Of the event loop; an answer that is there already takes fewer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


async def asked_by_three(server: Server) -> tuple[list[httpx.Response], int]:
    """The answers of those who ask at once, and how often others had their turn until they were there."""
    assert server.app is not None
    turns = 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:
        asked = asyncio.gather(*(client.get(PATH) for _ in range(3)))
        while not asked.done():
            await asyncio.sleep(0)
            turns += 1
        return await asked, turns


def test_others_are_served_while_the_document_is_made_once(server: Server) -> None:
    assert server.app is not None
    made = []

    def describe() -> bytes:
        made.append(app.describe())
        return made[0]

    server.app.state.document = app.Document(describe)
    answers, turns = server.call(asked_by_three(server), 120)
    again, turns_again = server.call(asked_by_three(server), 120)
    assert turns > FEW_TURNS > turns_again
    assert len(made) == 1
    first, *others = [*answers, *again]
    assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
    assert {answer.content for answer in others} == {first.content}
    assert first.json()["info"]["title"] == "Bloomery"


def test_the_document_is_for_everybody(server: Server) -> None:
    """Who has no key is to know how one is shown."""
    for headers in ({}, {"x-api-key": KEY}):
        assert server.call(_status(server, headers)) == 200


async def _status(server: Server, headers: dict[str, str]) -> int:
    assert server.app is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server", headers=headers) as client:
        return (await client.head(PATH)).status_code
