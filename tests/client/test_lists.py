"""Everything that lists gives a list, whole and once, however many pages the server makes of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.client import Client
from bloomery.client.http import Http
from bloomery.types.errors import NotFound
from tests.api.server import Server, serving
from tests.services.stage import chat


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def test_everything_that_lists_gives_a_list(server: Server) -> None:
    with server.client() as client:
        run = client.create_run("tiny", 4)
        run.save_checkpoint("end").result()
        client.deployments.create("router", "tiny")
        client.datasets.create("data")
        version = client.datasets.add_version("data", {"train": '{"text": "q", "label": "a"}'})
        server.services.traffic.record(chat("chatcmpl-1"))
        listed = [
            client.models(),
            client.runs(),
            run.checkpoints(),
            client.deployments.list(),
            client.datasets.list(),
            client.datasets.rows("data", version.id),
            client.spans.list(),
        ]
        assert [(type(found), len(found)) for found in listed] == [(list, 1)] * len(listed)
        with pytest.raises(NotFound):
            client.datasets.rows("data", "version-x")


def test_a_list_is_read_to_its_end_or_to_its_limit(server: Server) -> None:
    with server.client() as client:
        for number in range(450):
            server.services.traffic.record(chat(f"chatcmpl-{number:03}", started_us=number))
        newest_first = [f"chatcmpl-{number:03}" for number in reversed(range(450))]
        assert [span.id for span in client.spans.list()] == newest_first
        assert [span.id for span in client.spans.list(limit=201)] == newest_first[:201]
        assert [span.id for span in client.spans.list(until_us=9, limit=3)] == ["chatcmpl-008", "chatcmpl-007", "chatcmpl-006"]
        client.datasets.create("data")
        rows = "\n".join(json.dumps({"text": f"t{number}", "label": "x"}) for number in range(250))
        version = client.datasets.add_version("data", {"train": rows})
        assert len(client.datasets.rows("data", version.id)) == 250
        assert [row.messages[0]["content"] for row in client.datasets.rows("data", version.id, limit=2)] == ["t0", "t1"]


def test_no_more_is_asked_for_than_the_limit() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        return httpx.Response(200, json={"data": [], "offset": 0, "has_more": False})

    with Client("http://server", "tml-key", transport=httpx.MockTransport(answer)) as client:
        client.spans.list(limit=5)
        client.spans.list(deployment="router", kinds=["chat", "completion"])
    assert asked == ["limit=5&offset=0", "limit=200&offset=0&deployment=router&kind=chat&kind=completion"]


def test_what_new_items_push_to_the_next_page_is_listed_once() -> None:
    """A server on which something is added between the first page and the second."""
    pages: list[list[dict[str, Any]]] = [[{"id": "c"}, {"id": "b"}], [{"id": "b"}, {"id": "a"}]]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": pages.pop(0), "offset": 0, "has_more": bool(pages)})

    http = Http("http://server", "tml-key", transport=httpx.MockTransport(answer), timeout_s=5, patience_s=5)
    assert [item["id"] for item in http.pages("/api/v1/spans")] == ["c", "b", "a"]
