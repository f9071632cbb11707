"""The dashboard in a real browser: `python -m bench.web` prints one JSON line. It takes Chromium and Playwright, which `make test-web` installs.

A server has a run of `--points` measured steps and `--rows` recorded requests, written where it keeps them, and answers as it always does. Measured
is how long the home page takes until it shows what the server told and is free to answer a click, with nothing kept in the browser and with scripts
and styles kept; and the frames a second of that curve while keys zoom into it, move along and out again, and of that table while it is scrolled: an
input for every frame. `ratio` is the frames by those of a page with nothing on it under the same inputs, which no page can beat, and
`longest_frame_ms` the worst of them; of a load `least_ms` is how long a picture of a few lines takes from the same server.
"""

import itertools
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine, insert

from bench.line import Line, parser_of
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.services.data.span_sums import add_spans
from bloomery.store import rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODEL: Final = "bloomery-tiny"
BEGAN_US: Final = 1_700_000_000_000_000
SIZE: Final[Any] = {"width": 1280, "height": 800}
PATIENCE_MS: Final = 120_000
INPUT_S: Final = 1 / 60
EMPTY: Final = "/ui/icon.svg"
KEYS: Final = (*"+++", *("ArrowRight",) * 6, *("ArrowLeft",) * 12, *"-+-+", "0")
_COUNT: Final = """() => {
    window.frames_ms = [];
    const frame = (now) => { window.frames_ms.push(now); requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
}"""
_PAINTED: Final = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


def main() -> None:
    """Loads, then the curve, then the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=10_000, help="at most 10,000, which is what a list shows")
    parser.add_argument("--loads", type=int, default=9, help="of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of zooming, of scrolling, and of the same on an empty page")
    asked = parser.parse_args()
    line = Line("web")
    # Here: who has no browser can still ask for help.
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or sys.exit("Chromium is not installed: run `make test-web`, which installs it")
    with serving(MODEL, keep=False, options=("--replicas", "0")) as server, Client(server.url, server.key) as client, sync_playwright() as playwright:
        run = client.create_run(MODEL, 8, seed=1, name="long").id
        _fill(DataDir(server.data_dir).database, run, asked.points, asked.rows)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        setting = {"model": MODEL, "browser": f"Chromium {browser.version}", "headless": True, "window": SIZE, "inputs_per_s": round(1 / INPUT_S)}
        load = _loads(browser, server.url, server.key, asked.loads)
        page = _logged_in(browser, server.url, server.key)
        line.tell(setting | {"load": load, "curve": _curve(page, run, asked.points, asked.seconds), "table": _table(page, asked.rows, asked.seconds)})
        browser.close()


def _fill(database: Path, run: str, points: int, requests: int) -> None:
    """What has been measured of a run, and as many requests."""
    measured = [
        {"project": "default", "run_id": run, "seq": n, "name": "loss", "step": n, "value": 2.0 + n * 7919 % 1000 / 1000, "created_us": BEGAN_US + n}
        for n in range(1, points + 1)
    ]
    span = {"project": "default", "kind": "chat", "name": "chat", "base_hash": "0" * 64, "status": "ok", "out_tokens": 64, "cached_tokens": 0}
    span |= {"finish_reason": "stop", "tags": "{}", "consent": "none", "redaction_ver": "", "redacted": 0}
    recorded = [
        span
        | {"id": f"chatcmpl-{n:024x}", "model": f"model-{n % 7}", "version": f"{n % 7:064x}", "started_us": BEGAN_US + n, "in_tokens": n}
        | {"ttft_us": 1000 + n, "duration_us": 100_000 + n * 7919 % 99_991, "seed": n}
        for n in range(requests)
    ]
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 60})
    with engine.begin() as connection:
        connection.execute(insert(rows.run_metric), measured)
        connection.execute(insert(rows.span), recorded)
        add_spans(connection, recorded)
    engine.dispose()


def _loads(browser: "Browser", url: str, key: str, count: int) -> dict[str, object]:
    """Each kind as often as the others, and taking turns in going first: who does begins a process of the browser."""
    found: dict[str, list[float]] = {"ms": [], "kept_ms": [], "least_ms": []}
    for turn in range(count):
        page = _logged_in(browser, url, key)
        cache = page.context.new_cdp_session(page)
        names = [*found]
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            cache.send("Network.setCacheDisabled", {"cacheDisabled": name == "ms"})
            found[name].append(_load_ms(page, EMPTY if name == "least_ms" else "/"))
        page.context.close()
    return {"loads": count, **{name: round(statistics.median(each)) for name, each in found.items()}, "longest_ms": round(max(found["ms"]))}


def _load_ms(page: "Page", place: str) -> float:
    """From the request to what is shown, after which the page is free to answer."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(place, wait_until="commit")
    if place == EMPTY:
        page.locator("svg").wait_for()
    else:
        page.get_by_text("Recording of traffic").wait_for()
    page.evaluate(_PAINTED)
    return (time.perf_counter() - began) * 1000


def _logged_in(browser: "Browser", url: str, key: str) -> "Page":
    page = browser.new_context(viewport=SIZE, base_url=url).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Open").click()
    page.get_by_text("Recording of traffic").wait_for()
    return page


def _curve(page: "Page", run: str, points: int, seconds: float) -> dict[str, object]:
    """Zoomed into, moved along and out again, by keys, with the pointer over it."""

    def act(turn: int) -> None:
        page.keyboard.press(KEYS[turn % len(KEYS)])
        page.mouse.move(200 + turn * 7 % 800, 400 + turn % 50)

    page.goto(EMPTY)
    limit = _frames(page, seconds, act)
    began = time.perf_counter()
    page.goto(f"/runs/{run}")
    panel = page.get_by_role("region", name="Loss", exact=True)
    panel.locator("canvas").wait_for()
    page.evaluate(_PAINTED)
    shown_ms = round((time.perf_counter() - began) * 1000)
    panel.get_by_role("application").focus()
    box = panel.locator(".u-over").bounding_box()
    if box is None:
        raise SystemExit("the curve is not in sight")

    def zoom(turn: int) -> None:
        page.keyboard.press(KEYS[turn % len(KEYS)])
        page.mouse.move(box["x"] + turn * 7 % box["width"], box["y"] + box["height"] / 2 + turn % 50)

    found = _frames(page, seconds, zoom)
    said = panel.get_by_role("status").inner_text()
    if f"of 1 to {points:,}" not in said:
        raise SystemExit(f"the keys should have zoomed a curve of {points} points, and it says `{said}`")
    return {"points": points, "shown_ms": shown_ms, **_beside(found, limit)}


def _table(page: "Page", requests: int, seconds: float) -> dict[str, object]:
    """Scrolled down, and up again where it ends."""
    place = 37 * requests
    down = (place // 4000) or 1

    def act(turn: int) -> None:
        page.mouse.wheel(0, 400 if turn // (10 * down) % 2 == 0 else -400)

    page.goto(EMPTY)
    page.mouse.move(400, 500)
    limit = _frames(page, seconds, act)
    began = time.perf_counter()
    page.goto("/traces")
    table = page.get_by_role("region", name="requests")
    page.get_by_role("status").filter(has_text=re.compile(rf"^{requests}$")).wait_for()
    page.evaluate(_PAINTED)
    shown_ms = round((time.perf_counter() - began) * 1000)
    table.scroll_into_view_if_needed()
    box = table.bounding_box()
    if box is None:
        raise SystemExit("the table is not in sight")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
    found = _frames(page, seconds, act)
    page.mouse.wheel(0, 400)
    # Else this waits for as long as a page is waited for.
    page.wait_for_function("table => table.scrollTop > 0", arg=table.element_handle())
    return {"rows": requests, "shown_ms": shown_ms, **_beside(found, limit)}


def _frames(page: "Page", seconds: float, act: Callable[[int], None]) -> list[float]:
    """How long each frame took, in milliseconds, with an input for each of them; it is told which."""
    page.evaluate(_COUNT)
    began = time.perf_counter()
    for turn in itertools.count():
        if (now := time.perf_counter()) - began >= seconds:
            break
        act(turn)
        # So that inputs come as a hand makes them, however fast the browser takes them.
        time.sleep(max(0.0, now + INPUT_S - time.perf_counter()))
    times: list[float] = page.evaluate("() => window.frames_ms")
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _beside(found: list[float], limit: list[float]) -> dict[str, object]:
    rate, most = (1000 * len(each) / sum(each) for each in (found, limit))
    return {
        "frames_per_s": round(rate, 1),
        "empty_frames_per_s": round(most, 1),
        "ratio": round(rate / most, 3),
        "longest_frame_ms": round(max(found), 1),
        "empty_longest_frame_ms": round(max(limit), 1),
    }


if __name__ == "__main__":
    main()
