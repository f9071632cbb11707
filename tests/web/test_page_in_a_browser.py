"""The page in a real browser, with a real server behind it. `make test-web` installs Chromium; without it these tests fail, they do not skip."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.recipes.sft import datum
from tests.live import LiveServer

pytestmark = pytest.mark.web

QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PAGE_MS = 8000


@pytest.fixture(scope="module")
def page(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's document after its script has run, with two runs, one deployment and one judged answer to show."""
    with Client(live_server.url, live_server.key) as client:
        run = client.create_run("bloomery-tiny", 8, seed=1, name="<b>furnace</b>")
        gradients = [(run.forward_backward([datum([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])]), run.optim_step(1e-3)) for _ in range(3)]
        assert [update.result().metrics["step"] for _, update in gradients] == [1, 2, 3]
        client.create_run("bloomery-tiny", 0, seed=1, name="whole")
        client.deployments.create("seen-in-a-browser", run.save_snapshot("one").result().version)
        assert client.versions.measure_fidelity("seen-in-a-browser").verdict == "pass"
        answer = client.chat("seen-in-a-browser", [{"role": "user", "content": "Hello"}], max_tokens=4)
        client.feedback(answer["id"], "helpful", True)
    return rendered(f"{live_server.url}/#key={live_server.key}", tmp_path_factory.mktemp("profile"))


def rendered(url: str, profile: Path) -> str:
    browser = shutil.which("chromium")
    assert browser, "Chromium is not installed: run `make test-web`"
    argv = [browser, "--headless", "--no-sandbox", *QUIET, f"--user-data-dir={profile}", f"--virtual-time-budget={PAGE_MS}", "--dump-dom", url]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_shows_runs_deployments_and_judged_traffic(page: str) -> None:
    assert "seen-in-a-browser (revision 1)" in page
    assert "pass, equal bits" in page
    assert "helpful: true" in page
    assert "<path" in page or "<polyline" in page, "no curve was drawn"


def test_the_page_says_what_was_proved(page: str) -> None:
    (process,) = re.findall(r"<tr><td[^>]*>engine of bloomery-tiny</td>(.*?)</tr>", page)
    root, probe, versions, _, condemned = re.findall(r"<td[^>]*>([^<]*)</td>", process)
    assert re.fullmatch(r"[0-9a-f]{12}", root)
    assert (probe, condemned) == ("equal bits", "none")
    assert re.fullmatch(r"[1-9]\d*, probes equal bits", versions)
    (deployment,) = re.findall(r"<tr><td[^>]*>seen-in-a-browser</td>(.*?)</tr>", page)
    assert ">engine<" in deployment


def test_a_run_says_what_it_trains(page: str) -> None:
    behind_the_base = dict(re.findall(r"<tr><td[^>]*>([^<]+)</td><td[^>]*>bloomery-tiny</td><td[^>]*>([^<]+)</td>", page))
    assert [behind_the_base[name] for name in ("&lt;b&gt;furnace&lt;/b&gt;", "whole")] == ["rank 8", "all parameters"]


def test_names_are_shown_as_text(page: str) -> None:
    assert "&lt;b&gt;furnace&lt;/b&gt;" in page
    assert "<b>furnace</b>" not in page
