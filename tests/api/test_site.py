"""What is served of the dashboard: the build where there is one, its index at every page, words where there is none; and nothing else of the disk."""

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from bloomery.api import errors
from bloomery.api.app import describe
from bloomery.api.page import _NO_PAGES, no_page, page_router
from bloomery.ui import PAGES, Asset, site, words

SCRIPT = "console.log('bloomery');\n" * 100


@contextmanager
def browsing(assets: Mapping[str, Asset]) -> Iterator[TestClient]:
    """A browser at a server of nothing but this site."""
    app = FastAPI(openapi_url=None)
    errors.install(app, no_page(assets))
    app.include_router(page_router(assets))
    with TestClient(app, headers={"accept-encoding": "identity"}) as browser:
        yield browser


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """As the build leaves it."""
    folder = tmp_path / "dist"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text('<!doctype html><script type="module" src="/ui/assets/index-C43I8l-4.js"></script>')
    (folder / "assets/index-C43I8l-4.js").write_text(SCRIPT)
    (folder / "icon.svg").write_text("<svg/>")
    (folder / ".vite").mkdir()
    (folder / ".vite/manifest.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


def test_every_page_is_the_index_and_is_asked_for_anew(dist: Path) -> None:
    with browsing(site(dist)) as browser:
        for path in ("/", *(f"/{page}" for page in PAGES), "/runs/run-1/rollouts/7", "/traces/", "/ui/index.html"):
            page = browser.get(path)
            assert (page.status_code, page.text) == (200, (dist / "index.html").read_text()), path
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert page.headers["cache-control"] == "no-cache"
            policy = page.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert browser.head("/").status_code == 200
        assert browser.post("/").status_code == 405


def test_a_page_that_there_is_not_is_one_that_says_so_and_programs_are_told_in_their_envelope(dist: Path) -> None:
    wants_page = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    with browsing(site(dist)) as browser:
        for path in ("/nowhere", "/runsx", "/apis", "/deployment/front"):
            page = browser.get(path, headers=wants_page)
            assert (page.status_code, page.text) == (404, (dist / "index.html").read_text()), path
            assert page.headers["content-security-policy"].startswith("default-src 'none'")
            assert browser.get(path).json()["error"]["code"] == "not_found"
        for path in ("/api/v1/nowhere", "/api", "/v1/nowhere", "/oai/api/v1/nowhere", "/ui/nowhere"):
            answer = browser.get(path, headers=wants_page)
            assert answer.status_code == 404
            assert set(answer.json()) == {"error"}, path
        assert browser.post("/nowhere", headers=wants_page).json()["error"]["code"] == "not_found"


def test_browsers_find_the_icon_where_they_look_for_it_by_themselves(dist: Path) -> None:
    with browsing(site(dist)) as browser:
        icon = browser.get("/favicon.ico")
        assert (icon.status_code, icon.text, icon.headers["content-type"]) == (200, "<svg/>", "image/svg+xml")


def test_what_has_a_hash_in_its_name_is_kept_and_compressed_for_who_takes_it(dist: Path) -> None:
    with browsing(site(dist)) as browser:
        whole = browser.get("/ui/assets/index-C43I8l-4.js")
        assert (whole.text, whole.headers["content-type"]) == (SCRIPT, "text/javascript; charset=utf-8")
        assert whole.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert "content-encoding" not in whole.headers
        for accepted, zipped in (("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0, br", False), ("br", False)):
            answer = browser.get("/ui/assets/index-C43I8l-4.js", headers={"accept-encoding": accepted})
            assert (answer.text, answer.headers.get("content-encoding") == "gzip") == (SCRIPT, zipped), accepted
            assert answer.headers["vary"] == "accept-encoding"
        assert int(browser.get("/ui/assets/index-C43I8l-4.js", headers={"accept-encoding": "gzip"}).headers["content-length"]) < len(SCRIPT) / 5
        icon = browser.get("/ui/icon.svg", headers={"accept-encoding": "gzip"})
        assert (icon.headers["content-type"], icon.headers["cache-control"]) == ("image/svg+xml", "no-cache")
        assert "content-encoding" not in icon.headers


def test_nothing_but_the_build_is_served_and_what_it_was_at_the_start(dist: Path) -> None:
    with browsing(site(dist)) as browser:
        (dist / "index.html").write_text("changed")
        (dist / "later.js").write_text("later")
        assert browser.get("/").text != "changed"
        for path in (
            "/ui/later.js",
            "/ui/.vite/manifest.json",
            "/ui/../secret.txt",
            "/ui/%2e%2e/secret.txt",
            "/ui/assets/..%2f..%2f..%2fsecret.txt",
            "/ui//etc/passwd",
            "/ui/assets",
            "/ui/",
            "/runsx",
            "/secret.txt",
        ):
            answer = browser.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path


def test_where_nothing_was_built_words_say_how_to_get_it(tmp_path: Path) -> None:
    assert "/" in site(tmp_path)
    with browsing(words()) as browser:
        for path in ("/", "/runs/run-1"):
            page = browser.get(path)
            assert page.status_code == 200
            for said in ("Node.js 20", "make web", "wheel", "bloomery --help", "API"):
                assert said in page.text
            assert "<script" not in page.text
            assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_same_build_is_compressed_to_the_same_bytes() -> None:
    one, other = Asset(SCRIPT.encode(), "text/javascript").zipped, Asset(SCRIPT.encode(), "text/javascript").zipped
    assert one is not None
    assert one == other
    assert gzip.decompress(one) == SCRIPT.encode()


def test_every_route_that_is_published_begins_as_no_page_does() -> None:
    beginnings = {f"/{path.split('/')[1]}" for path in json.loads(describe())["paths"]}
    assert "/v1" in beginnings
    assert beginnings <= set(_NO_PAGES)
