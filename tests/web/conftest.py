"""A real browser before a real server. `make test-web` installs Chromium and Playwright; without them these tests fail, they do not skip."""

import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.live import LiveServer, running_server
from tests.web.world import World, build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZE = {"width": 1280, "height": 800}
WAIT_MS = 20_000


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running_server(tmp_path_factory.mktemp("web") / "data", jobs=1) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, server.key) as client:
        yield client


@pytest.fixture(scope="session")
def world(client: Client) -> World:
    return build(client)


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    assert found, "Chromium is not installed: run `make test-web`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-quic"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def key(server: LiveServer) -> str:
    """Whom pages are shown to."""
    return server.key


@pytest.fixture
def page(browser: "Browser", server: LiveServer, key: str) -> Iterator["Page"]:
    """Logged in, at the home page. Whatever the console calls an error fails the test."""
    context = browser.new_context(viewport=SIZE, base_url=server.url)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    log_in(page, key)
    yield page
    context.close()
    assert not complaints


def log_in(page: "Page", key: str) -> None:
    """As the address that `bloomery up` prints does it, up to the home page."""
    page.goto(f"/#key={key}")
    page.get_by_role("button", name=re.compile("^Log in to")).click()
    page.get_by_role("heading", name="Home").wait_for()
