"""The next version of what there is already: of a grader, which new jobs then take, and of a data set, by a file that is chosen or dropped."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.methods import Reinforcement
from tests.web.test_data_pages import dropped, rows
from tests.web.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
FIRST = "def score(output):\n    return 0.0\n"
NEXT = "def score(output, pairs):\n    return float(len(pairs)) / 8\n"


def test_a_grader_is_tried_on_rows_and_kept_as_the_next_version_which_new_jobs_take_and_name(page: "Page", world: World, client: Client) -> None:
    client.graders.create("growing", {"type": "function", "source": FIRST, "entry": "score"})
    page.goto("/graders/growing")
    page.get_by_text("What is known of version 1").wait_for()
    page.get_by_label("Source").fill(NEXT)
    page.get_by_label("Rows of a data set").select_option("prompts")
    page.get_by_label("output 8").wait_for()
    page.get_by_role("button", name="Run").click()
    scores = page.get_by_role("region", name="Try it").get_by_role("cell", name="0.25", exact=True)
    scores.nth(7).wait_for()
    page.get_by_role("button", name="Keep as the next version").click()
    page.get_by_text("What is known of version 2").wait_for()
    assert page.get_by_label("Source").input_value() == NEXT
    page.get_by_role("combobox", name=re.compile("^Version")).select_option("1")
    page.get_by_text("What is known of version 1").wait_for()
    assert page.get_by_label("Source").input_value() == FIRST
    assert [client.graders.get("growing", version).spec["source"] for version in (1, 2)] == [FIRST, NEXT]
    page.goto("/jobs")
    page.get_by_role("radio", name=re.compile("Reinforcement")).check(force=True)
    page.get_by_label("Name", exact=True).fill("by-the-next")
    page.get_by_label("Data set").select_option("prompts")
    page.get_by_label("Grader", exact=True).select_option("growing")
    page.get_by_role("complementary", name="What it would take").locator("dl[aria-busy=false]").wait_for()
    assert page.locator('[id="field-method.grader_version"]').get_attribute("placeholder") == "2"
    page.get_by_role("button", name="Start the job").click()
    page.get_by_role("heading", name="by-the-next").wait_for()
    job = client.jobs.get("by-the-next")
    client.jobs.cancel(job.id)
    assert isinstance(job.spec.method, Reinforcement)
    assert job.spec.method.grader_version == 2
    page.get_by_role("link", name="growing, version 2").click()
    page.get_by_text("What is known of version 2").wait_for()


def test_a_file_that_is_chosen_adds_to_the_rows_of_a_data_set_without_the_broken_ones(page: "Page", client: Client) -> None:
    _begin(client, "added-to")
    page.goto("/datasets/added-to")
    page.get_by_role("heading", name="added-to").wait_for()
    text = "\n".join([*rows(6, start=900), '{"messages": [', '{"messages": [{"role": "nobody", "content": "x"}]}'])
    page.locator("input[type=file]").set_input_files({"name": "more.jsonl", "mimeType": "application/jsonl", "buffer": text.encode()})
    dialog = page.get_by_role("dialog", name="Upload more.jsonl")
    assert dialog.get_by_label("Data set").is_disabled()
    broken = dialog.get_by_role("region", name="broken rows")
    _said_of(broken, 7, "not_json")
    reason = _said_of(broken, 8, None)
    assert dialog.get_by_role("button", name="Store 6 rows").is_disabled()
    dialog.get_by_label("Leave out the 2 broken rows").check()
    dialog.get_by_label("Held out: eval").fill("0")
    assert dialog.get_by_label("Add to the rows of version 1").is_checked()
    dialog.get_by_role("button", name="Store 6 rows").click()
    page.wait_for_url(re.compile("version=2$"))
    left_out = page.get_by_role("region", name="Rows that were left out")
    _said_of(left_out, 7, "not_json")
    assert _said_of(left_out, 8, None) == reason
    first, second = client.datasets.get("added-to").versions
    assert (first.counts["train.rows"], second.counts["train.rows"], second.counts["train.rejected"]) == (10, 16, 2)
    assert second.parent == first.id


def test_a_file_that_is_dropped_on_a_data_set_may_take_the_place_of_its_rows(page: "Page", client: Client) -> None:
    _begin(client, "replaced")
    page.goto("/datasets/replaced")
    page.get_by_role("heading", name="replaced").wait_for()
    dialog = dropped(page, "others.jsonl", "\n".join(rows(4, start=950)))
    dialog.get_by_label("Held out: eval").fill("0")
    dialog.get_by_label("Add to the rows of version 1").uncheck()
    dialog.get_by_role("button", name="Store 4 rows").click()
    page.wait_for_url(re.compile("version=2$"))
    page.get_by_role("region", name="Versions").get_by_role("link", name="2", exact=True).wait_for()
    (_, second) = client.datasets.get("replaced").versions
    assert second.counts["train.rows"] == 4
    page.get_by_role("listbox").get_by_role("option", name="number 950").wait_for()


def _begin(client: Client, name: str) -> None:
    client.datasets.create(name)
    client.datasets.upload(name, "\n".join(rows(10)).encode(), format="jsonl")


def _said_of(told: "Locator", row: int, reason: str | None) -> str:
    """What stands beside the number of a row that is not taken."""
    cells = told.get_by_role("row").filter(has=told.page.get_by_role("cell", name=str(row), exact=True)).get_by_role("cell")
    cells.nth(2).wait_for()
    _, named, words = map(str, cells.all_inner_texts())
    assert named == reason or reason is None
    assert words
    return words
