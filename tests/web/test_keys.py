"""Keys that are made by clicking, for a project of their own, may what they say and nothing else, until they are revoked."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.errors import BloomeryError, Forbidden, Unauthorized
from tests.live import LiveServer
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
PROJECT = "a-project-of-its-own"


def test_a_key_of_another_project_may_what_was_ticked_there_and_nothing_once_it_is_revoked(page: "Page", server: LiveServer, client: Client) -> None:
    client.datasets.create("of-the-default-project")
    page.goto("/keys")
    with Client(server.url, _made(page, "looks", ["read"])) as looks, Client(server.url, _made(page, "asks", ["infer"])) as asks:
        assert looks.datasets.list() == []
        assert {each.alias for each in looks.models()} == {BASE}
        assert asks.chat(BASE, [{"role": "user", "content": "red is moon"}], max_tokens=1)["choices"]
        _refused(Forbidden, lambda: looks.chat(BASE, [{"role": "user", "content": "red is moon"}], max_tokens=1))
        _refused(Forbidden, lambda: looks.datasets.create("not-allowed"))
        _refused(Forbidden, lambda: looks.keys.list())
        _refused(Forbidden, lambda: asks.spans.list())
        _refused(Forbidden, lambda: asks.deployments.create("not-allowed", BASE))
        known = {(key.name, key.project): key.scopes for key in client.keys.list()}
        assert (known["looks", PROJECT], known["asks", PROJECT]) == (["read"], ["infer"])
        client.keys.create("rests", ["read"], project=PROJECT)
        page.reload()
        page.get_by_label("Search keys").fill(PROJECT)
        row = page.get_by_role("row").filter(has_text="looks")
        row.get_by_role("cell", name=PROJECT, exact=True).wait_for()
        row.get_by_role("cell", name=re.compile("^just now$| ago$")).wait_for()
        page.get_by_role("row").filter(has_text="rests").get_by_role("cell", name="never", exact=True).nth(1).wait_for()
        row.get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
        assert looks.datasets.list() == []
        row.get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        row.wait_for(state="detached")
        _refused(Unauthorized, lambda: looks.datasets.list())
        assert asks.chat(BASE, [{"role": "user", "content": "red is moon"}], max_tokens=1)["choices"]


def _made(page: "Page", name: str, scopes: list[str]) -> str:
    """A key of the other project with these scopes alone, as it is shown once."""
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog", name="New key")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_label("Project").fill(PROJECT)
    for box in dialog.get_by_role("checkbox").all():
        box.set_checked(box.get_attribute("value") in scopes)
    dialog.get_by_role("button", name="Create").click()
    shown = page.get_by_role("dialog", name=f"Key {name}")
    secret = shown.locator("code").inner_text()
    shown.get_by_role("button", name="Done").click()
    page.get_by_role("cell", name=name, exact=True).wait_for()
    return secret


def _refused(error: type[BloomeryError], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()
