"""The page is served whole, from here alone, and never takes text for markup."""

import re
from pathlib import Path

from bloomery.ui.old_page import assets
from tests.api.server import serving
from tests.api.test_site import browsing


def test_the_page_and_all_it_refers_to_are_served_without_a_key() -> None:
    with browsing(assets()) as browser:
        page = browser.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        references = set(re.findall(r'(?:src|href)="([^"]+)"', page.text)) | set(re.findall(r'from "([^"]+)"', browser.get("/ui/app.js").text))
        assert references == set(assets()) - {"/"}
        for path in references:
            assert browser.get(path).status_code == 200


def test_nothing_of_the_page_is_from_elsewhere_or_inline() -> None:
    for asset in assets().values():
        text = asset.content.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=|<style|\sstyle=", text)


def test_text_is_never_inserted_as_markup() -> None:
    script = assets()["/ui/app.js"].content.decode() + assets()["/ui/chart.js"].content.decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)


def test_the_script_asks_for_routes_that_exist(tmp_path: Path) -> None:
    script = assets()["/ui/app.js"].content.decode()
    asked = {re.sub(r"\$\{[^}]*\}", "x", path).partition("?")[0] for path in re.findall(r"""get\([`"](/[^`"]*)[`"]\)""", script)}
    assert asked == {"/status", "/runs", "/runs/x/metrics", "/deployments", "/spans", "/spans/x", "/feedback"}
    with serving(tmp_path) as server:
        for path in asked:
            body = server.http.get(f"/api/v1{path}").json()
            assert "no route" not in str(body.get("error", {}))
