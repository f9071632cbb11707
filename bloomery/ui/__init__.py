"""The dashboard as it is served: what `make web` built in `dist`, and where nothing was built a page of words that says how to get it.

It reads the public API and nothing else.
"""

from pathlib import Path
from typing import Final

from bloomery.ui.asset import Asset

__all__ = ["PAGES", "Asset", "site", "words"]

DIST: Final = Path(__file__).parent / "dist"
PAGES: Final = ("runs", "jobs", "rollouts", "datasets", "evaluations", "deployments", "traces", "playground", "graders", "labelling", "keys")
"""What the address of a page begins with; the script that is the same for all of them shows what is behind it."""
_KINDS: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""Written down here: what a machine takes an ending for depends on what is installed on it."""
_WORDS: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Bloomery</title>
<h1>Bloomery is running, and its dashboard was not built</h1>
<p>To get it, install Node.js 20.19 or newer, run <code>make web</code> in the checkout and start the server again; or install a wheel of
Bloomery, which brings it.</p>
<p>Everything works without it, from the command line (<code>bloomery --help</code>) and by the API (<code>/api/v1/openapi.json</code>).</p>
</html>
"""


def site(folder: Path = DIST) -> dict[str, Asset]:
    """Everything that browsers are sent, by the path of its route; read now, so that what changes on disk later changes no answer."""
    if (folder / "index.html").is_file():
        return _built(folder)
    return words()


def words() -> dict[str, Asset]:
    """What is said where nothing was built, at every page."""
    return _at_every_page(Asset(_WORDS.encode(), "text/html"))


def _built(folder: Path) -> dict[str, Asset]:
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    found = {f"/ui/{name}": _asset(name, file) for name, file in files.items() if not any(part.startswith(".") for part in name.split("/"))}
    # Browsers ask for it by themselves where a page names none: those of errors, for example.
    icon = {"/favicon.ico": found["/ui/icon.svg"]} if "/ui/icon.svg" in found else {}
    return found | icon | _at_every_page(found["/ui/index.html"])


def _asset(name: str, file: Path) -> Asset:
    return Asset(file.read_bytes(), _KINDS.get(file.suffix, "application/octet-stream"), lasting=name.startswith("assets/"))


def _at_every_page(index: Asset) -> dict[str, Asset]:
    below = {f"/{page}{rest}": index for page in PAGES for rest in ("", "/{rest:path}")}
    return {"/": index, **below}
