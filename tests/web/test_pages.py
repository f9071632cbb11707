"""Every page, in a real browser with a real server behind it."""

import itertools
import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.resources import Price
from tests.live import LiveServer, wait_until
from tests.web.conftest import SIZE, WAIT_MS, log_in
from tests.web.test_data_pages import rows
from tests.web.test_hostile import WIDE
from tests.web.world import BASE, HOSTILE, World, places, trained

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
BOXES = """(whole) => [...whole.children].map((part) => {
    const { left, top } = part.getBoundingClientRect();
    return [left, left + part.scrollWidth, top];
})"""


def test_home_says_what_is_live_what_trains_and_that_every_process_is_well(page: "Page", world: World, client: Client) -> None:
    page.goto("/")
    live = page.get_by_role("region", name="What is live")
    live.get_by_role("link", name=world.deployment).wait_for()
    assert "revision 2" in live.inner_text()
    live.get_by_text("pass, equal bits").first.wait_for()
    trains = page.get_by_role("region", name="What trains")
    assert {"taught", "rewarded", HOSTILE} <= set(trained(client))
    wait_until(lambda: trains.locator(".name").all_inner_texts() == trained(client)[:8])
    page.get_by_role("region", name="Processes").get_by_text("runner ").first.wait_for()
    processes = page.get_by_role("region", name="Processes").inner_text()
    assert f"engine of {BASE}" in processes
    assert "equal bits" in processes
    assert "ready" in processes


def test_home_has_evaluations_as_long_as_they_are_under_way(page: "Page", world: World, client: Client) -> None:
    assert client.evaluations.get(world.evaluation).finished_us is not None
    long = {
        "data": {"dataset": "prompts", "split": "eval", "rows": 8},
        "models": [BASE],
        "graders": ["right"],
        "params": {"max_tokens": 400, "samples": 64, "temperature": 1.5},
    }
    made = [client.evaluations.create(EvaluationSpec.model_validate({"name": name, **long})) for name in ("under-way", "behind-it")]
    page.goto("/")
    evaluated = page.get_by_role("region", name="What is evaluated")
    evaluated.get_by_role("link", name="behind-it").wait_for()
    evaluated.get_by_role("link", name="under-way").click()
    page.get_by_role("heading", name="under-way").wait_for()
    page.go_back()
    evaluated.get_by_text("1 model on prompts, ").first.wait_for()
    assert evaluated.get_by_role("link", name="compared").count() == 0, "it has ended"
    for each in made:
        client.evaluations.cancel(each.id)
        evaluated.get_by_role("link", name=each.spec.name).wait_for(state="detached")


def test_what_people_and_models_wrote_never_runs(page: "Page", world: World) -> None:
    for place in ("/", "/runs", f"/runs/{world.program}", "/traces", "/datasets/damaged"):
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        assert "stolen" not in page.title() or HOSTILE in page.title()
        assert page.locator("img[src=x]").count() == 0
    page.goto(f"/traces?deployment={world.deployment}")
    page.get_by_role("row").filter(has_text="length").click()
    page.get_by_text(HOSTILE, exact=True).first.wait_for()
    assert page.locator("img[src=x]").count() == 0


def test_no_page_is_wider_than_a_laptop(page: "Page", world: World) -> None:
    wide: dict[str, list[str]] = {}
    for place in places(world):
        page.goto(place)
        page.get_by_role("heading", level=1).wait_for()
        page.wait_for_load_state("networkidle")
        if found := page.evaluate(WIDE):
            wide[place] = found
    assert not wide


def test_an_address_that_nobody_made_breaks_nothing(page: "Page", world: World) -> None:
    page.evaluate("history.pushState(null, '', '/nothing/%'); dispatchEvent(new PopStateEvent('popstate'))")
    page.get_by_role("heading", level=1).wait_for()
    page.goto(f"/runs/compare?of={world.taught.id},{world.taught.id}")
    page.get_by_role("heading", name="Compare 1 run", exact=True).wait_for()
    page.get_by_role("region", name="Loss", exact=True).locator("canvas").wait_for()


def test_an_address_that_is_no_page_says_so_and_leads_home(browser: "Browser", server: LiveServer) -> None:
    # The console of a browser complains of what is not found: `page` would fail.
    with browser.new_context(viewport=SIZE, base_url=server.url) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        log_in(page, server.key)
        answer = page.goto("/nothing/here")
        assert answer is not None
        assert answer.status == 404
        page.get_by_role("heading", name="There is no such page").wait_for()
        page.get_by_role("main").get_by_role("link", name="Home").click()
        page.get_by_role("heading", name="Home").wait_for()


def test_home_says_what_each_check_is_and_which_processes_it_counts(page: "Page") -> None:
    page.goto("/")
    page.get_by_text("needed processes ready").wait_for()
    processes = page.get_by_role("region", name="Processes")
    processes.get_by_text("What these checks are").click()
    for title in ("Test answer", "Checked again"):
        assert processes.get_by_role("columnheader", name=title).get_attribute("title") in processes.locator("ul").inner_text()


def test_a_clone_leaves_open_what_was_filled_in_and_what_it_would_take_is_of_what_stands_there(page: "Page", world: World) -> None:
    page.goto(f"/jobs?clone={world.rewarded.id}")
    version = page.locator('[id="field-method.grader_version"]')
    version.wait_for()
    assert version.input_value() == "1"
    assert page.locator('[id="field-begin.run"]').input_value() == ""
    taken = page.get_by_role("complementary", name="What it would take")
    estimated = taken.locator("dl[aria-busy=false]")
    estimated.wait_for()
    page.get_by_label("Grader", exact=True).select_option("short")
    assert version.input_value() == ""
    estimated.wait_for()


def test_what_opened_a_question_has_the_focus_again(page: "Page", world: World) -> None:
    page.goto("/keys")
    page.get_by_role("button", name="New key").press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.textContent").strip() == "New key"


def test_the_newest_step_is_followed_where_that_is_asked_for_alone(page: "Page", world: World) -> None:
    page.goto(f"/rollouts/{world.rewarded.run}")
    page.get_by_role("region", name=re.compile(r"^group \d+$")).first.wait_for()
    steps = page.get_by_role("combobox", name=re.compile("^Step"))
    assert steps.input_value().isdigit()
    steps.select_option("newest")
    page.wait_for_url("**step=newest")
    page.get_by_role("button", name="The step before").click()
    page.wait_for_url(re.compile(r"step=\d+"))
    page.get_by_role("region", name=re.compile(r"^group \d+$")).first.wait_for()


def test_what_is_said_of_a_rollout_stands_beside_each_other_and_not_on_top(page: "Page", world: World) -> None:
    page.goto(f"/rollouts/{world.rewarded.run}")
    header = page.get_by_role("article", name=re.compile("^rollout ")).first.locator("header")
    header.wait_for()
    boxes = header.evaluate(BOXES)
    assert len(boxes) == 3
    for (_, end, top), (begin, _, below) in itertools.pairwise(boxes):
        assert begin >= end or below > top


def test_a_deployment_is_rolled_back_and_forth_and_every_swap_is_told(page: "Page", world: World, client: Client) -> None:
    page.goto(f"/deployments/{world.deployment}")
    page.get_by_role("region", name="Fidelity").get_by_text("100 % of").wait_for(timeout=90_000)
    page.get_by_role("button", name="Roll back to it").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_role("dialog").wait_for(state="detached")
    page.get_by_role("region", name="Live").get_by_text("revision 1").wait_for()
    assert client.deployments.get(world.deployment).live.number == 1
    page.get_by_role("button", name="Roll back to it").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_role("region", name="Live").get_by_text("revision 2").wait_for()
    swaps = page.get_by_role("region", name="Swaps").locator("tbody tr")
    swaps.nth(3).wait_for()
    told = [row.locator("td").all_inner_texts() for row in swaps.all()]
    swapped = [what for _, what, _, _ in told]
    assert swapped[:2] == ["rolled back from revision 1 to revision 2", "rolled back from revision 2 to revision 1"]
    assert swapped[-2:] == ["promoted from revision 1 to revision 2", "deployed as revision 1"]
    assert {by for _, _, _, by in told} == {"development"}
    assert all(took.endswith("s") for _, _, took, _ in told)


def test_traces_are_seen_whole_at_the_width_of_a_laptop_and_their_costs_have_their_points_below_each_other(page: "Page", client: Client) -> None:
    client.deployments.create("costly", BASE)
    client.deployments.set_price("costly", Price(prompt_usd_per_mtok=0.15, completion_usd_per_mtok=0.6))
    for tokens in (1, 3, 40):
        answer = client.chat("costly", [{"role": "user", "content": "red is moon"}], max_tokens=tokens, ignore_eos=True)
        client.feedback(answer["id"], "helpful", False)
    page.goto("/traces?deployment=costly")
    table = page.get_by_role("region", name="requests", exact=True)
    judged = table.get_by_role("row").filter(has_text="helpful: false")
    judged.nth(2).wait_for()
    assert table.evaluate("shown => shown.scrollWidth <= shown.clientWidth"), "nothing is off to the side"
    cut = "row => [...row.cells].filter((cell) => cell.scrollWidth > cell.clientWidth && !cell.querySelector('code')).map((cell) => cell.innerText)"
    assert [judged.nth(number).evaluate(cut) for number in range(3)] == [[], [], []]
    costs = table.locator("td:nth-child(9)").all_inner_texts()
    assert len(set(costs)) == 3
    assert len({len(cost.partition(".")[2]) for cost in costs}) == 1, costs


def test_a_data_set_has_no_panel_that_is_half_empty(page: "Page", world: World) -> None:
    page.goto("/datasets/chats")
    tokens, row = page.get_by_role("region", name="Tokens of train"), page.get_by_role("article", name="row 1")
    tokens.get_by_text("the longest has").wait_for()
    row.get_by_text("carry loss").wait_for()
    foot = "each => each.getBoundingClientRect().bottom"
    empty = f"shown => ({foot})(shown) - Math.max(...[...shown.querySelectorAll('*')].map({foot}))"
    for panel in (page.get_by_role("region", name="Training on it"), tokens, row):
        assert panel.evaluate(empty) < 60, panel


def test_a_trace_is_opened_judged_and_corrected(page: "Page", world: World, client: Client) -> None:
    page.goto("/traces?feedback=good")
    page.get_by_role("row").filter(has_text="helpful: true").first.wait_for()
    assert page.get_by_role("row").filter(has_text="helpful: false").count() == 0
    page.get_by_label("Search requests").fill("helpful")
    page.get_by_role("row").filter(has_text="helpful: true").first.click()
    trace = page.get_by_role("region", name=re.compile("Request"))
    trace.get_by_text("assistant", exact=True).wait_for()
    identity = page.url.split("/")[-1].split("?")[0]
    trace.get_by_label("Why").fill("wrong word")
    trace.get_by_role("button", name="Bad").click()
    trace.get_by_text("wrong word").wait_for()
    trace.get_by_label("Why").fill("another reason")
    trace.get_by_label("What would have been right").fill("{}")
    trace.get_by_role("button", name="Give this answer").click()
    trace.get_by_text("correction").wait_for()
    assert trace.get_by_label("Why").input_value() == "another reason"
    assert page.get_by_label("Search requests").input_value() == "helpful"
    assert ("correction", "{}") in {(each.metric, each.value) for each in client.spans.get(identity).feedback}


def test_a_trace_that_consents_goes_into_a_data_set_as_it_was_corrected(page: "Page", world: World, client: Client) -> None:
    answer = client.chat(world.deployment, [{"role": "user", "content": "red is moon"}], max_tokens=8, headers={"x-bloomery-consent": "train"})
    client.feedback(answer["id"], "correction", "as it should be", type="demonstration")
    page.goto(f"/traces/{answer['id']}")
    page.get_by_role("button", name="Add to a data set").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_label("The answer").input_value() == "as it should be"
    dialog.get_by_label("Data set").fill("from-a-trace")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_text("version 1 of from-a-trace").wait_for()
    (row,) = client.datasets.rows("from-a-trace", client.datasets.get("from-a-trace").versions[0].id, "train")
    assert [message["content"] for message in row.model_dump()["messages"]] == ["red is moon", "as it should be"]


def test_an_answer_that_breaks_off_is_no_part_of_the_conversation_and_its_question_is_given_back(page: "Page", world: World) -> None:
    page.goto(f"/playground?model={BASE}")
    begun = 'data: {"id": "one", "choices": [{"delta": {"content": "begun"}, "finish_reason": null}]}\r\n\r\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=begun), times=1)
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Most tokens").fill("4")
    page.get_by_label("Message", exact=True).fill("red is moon")
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_role("region", name="left").get_by_text("broke off before its end").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "red is moon"
    assert page.get_by_role("button", name="Save as example").count() == 0
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_role("region", name="left").get_by_role("group", name="answer").locator("span").first.wait_for()
    assert page.get_by_text("begun", exact=True).count() == 0


def test_two_models_answer_side_by_side_token_by_token(page: "Page", world: World) -> None:
    page.goto(f"/playground?model={world.deployment}&beside={BASE}")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Message", exact=True).fill("red is moon")
    page.get_by_label("Message", exact=True).press("Enter")
    for side in ("left", "right"):
        answer = page.get_by_role("region", name=side).get_by_role("group", name="answer")
        answer.locator("span").first.wait_for()
        assert "log-probability" in (answer.locator("span").first.get_attribute("title") or "")
    page.get_by_role("region", name="left").get_by_role("button", name="Save as example").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Data set").fill("from-the-playground")
    dialog.get_by_label("The answer").fill("as it should be")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_text("version 1 of from-the-playground").wait_for()
    dialog.get_by_role("link", name="Look at it").click()
    page.get_by_role("region", name="Versions").get_by_text("from the playground").wait_for()


def test_a_grader_is_written_tried_on_rows_which_stay_and_kept(page: "Page", world: World) -> None:
    page.goto("/graders/new")
    page.get_by_label("Name").fill("written-here")
    page.get_by_label("Source").fill("def score(output, pairs):\n    return float(len(pairs))\n")
    page.get_by_label("Rows of a data set").select_option("prompts")
    page.get_by_label("output 8").wait_for()
    page.get_by_label("output 1").fill("written by hand")
    page.get_by_role("button", name="Run").click()
    scores = page.get_by_role("cell", name="2", exact=True)
    scores.nth(7).wait_for()
    for number, keep in enumerate(("Keep", "Keep as the next version"), 1):
        page.get_by_role("button", name=keep, exact=True).click()
        page.get_by_role("heading", name="written-here").wait_for()
        page.get_by_text(f"What is known of version {number}").wait_for()
        scores.nth(7).wait_for()
        assert page.get_by_label("Rows of a data set").input_value() == "prompts"
        assert page.get_by_label("output 1").input_value() == "written by hand"
        page.get_by_label("Source").fill(f"# Once more.\ndef score(output, pairs):\n    return float(len(pairs)) + {number}\n")
        assert scores.count() == 0, "nothing of this source was tried"
        page.get_by_role("button", name="Run").click()
        scores = page.get_by_role("cell", name=str(2 + number), exact=True)
        scores.nth(7).wait_for()


def test_the_rows_that_a_grader_is_tried_on_fit_what_it_begins_with_and_what_it_is_given_is_told(page: "Page", client: Client) -> None:
    from playwright.sync_api import expect

    client.datasets.create("answered")
    client.datasets.upload("answered", "\n".join(rows(8)).encode(), format="jsonl")
    page.goto("/graders/new")
    page.get_by_text("called with what its parameters are named after").wait_for()
    tried = page.get_by_role("region", name="Try it")
    run = page.get_by_role("button", name="Run")
    for kind in ("Python function", "Comparison of texts", "Several in a formula"):
        page.get_by_label("Begin with another kind").select_option(kind)
        run.click()
        tried.get_by_role("cell", name="1", exact=True).wait_for()
        expect(tried.locator("tbody tr td:last-child")).to_have_text(["1", "0"], timeout=WAIT_MS)
    page.get_by_label("Rows of a data set").select_option("answered")
    tried.get_by_label("output 8").wait_for()
    run.click()
    tried.get_by_role("cell", name="1", exact=True).nth(7).wait_for()
    assert "reference" in tried.inner_text()


def test_answers_are_labelled_by_keyboard_blind_and_a_judge_is_calibrated(page: "Page", world: World) -> None:
    page.goto(f"/labelling?evaluation={world.evaluation}")
    page.get_by_role("region", name="answer to label").wait_for()
    assert world.deployment not in page.get_by_role("region", name="answer to label").inner_text()
    for key in "pfpfpfpf":
        page.keyboard.press(key)
    page.get_by_text("8 / 16").wait_for()
    page.keyboard.press("u")
    page.get_by_text("7 / 16").wait_for()
    page.get_by_role("button", name="With 7 labels").click()
    card = page.get_by_role("status").get_by_role("region", name=re.compile("^card of"))
    card.get_by_text("7 answers with labels of people").wait_for()
    assert "right@1" in card.inner_text()
    page.get_by_label("beside the judge").select_option("short@1")
    card.wait_for(state="detached")
    page.get_by_role("heading", name="Calibrate short@1").wait_for()


def test_pairs_that_people_prefer_become_a_data_set(page: "Page", world: World, client: Client) -> None:
    page.goto(f"/labelling?evaluation={world.evaluation}&mode=pairs")
    pair = page.get_by_role("region", name="answers to compare")
    pair.wait_for()
    assert BASE not in pair.inner_text()
    page.keyboard.press("1")
    page.get_by_label("Keep them as the data set").fill("preferred")
    page.get_by_role("button", name="Keep 1 pair", exact=True).click()
    page.get_by_text("version 1 of preferred").wait_for()
    assert client.datasets.get("preferred").versions[0].kind == "preference"


def test_a_key_is_made_shown_once_and_revoked(page: "Page", client: Client) -> None:
    page.goto("/keys")
    page.get_by_role("button", name="New key").click()
    page.get_by_role("dialog").get_by_label("Name").fill("for-a-test")
    page.get_by_role("dialog").get_by_label("Requests a minute").fill("7")
    page.get_by_role("button", name="Create").click()
    secret = page.get_by_role("dialog", name="Key for-a-test").locator("code").inner_text()
    assert secret.startswith("tml-")
    page.get_by_role("button", name="Done").click()
    row = page.get_by_role("row").filter(has_text="for-a-test")
    assert "7 requests" in row.inner_text()
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    row.wait_for(state="detached")
    assert "for-a-test" not in {key.name for key in client.keys.list()}


def test_what_changes_elsewhere_is_shown_without_being_asked_for(page: "Page", client: Client) -> None:
    page.goto("/graders")
    page.get_by_role("heading", name="Graders").wait_for()
    page.get_by_text("live", exact=True).wait_for()
    client.graders.create("from-elsewhere", {"type": "string_check", "operation": "eq", "input": "a", "reference": "a"})
    page.get_by_role("link", name="from-elsewhere").wait_for()


def test_rows_are_reached_and_opened_by_keyboard(page: "Page", world: World) -> None:
    page.goto("/deployments")
    row = page.get_by_role("row").filter(has_text=world.deployment)
    row.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=world.deployment).wait_for()
    page.go_back()
    page.get_by_role("heading", name="Deployments").wait_for()


def test_it_is_dark_where_that_is_wanted_and_stays_so(page: "Page") -> None:
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("document.documentElement.dataset.light") == "dark"
    page.reload()
    page.get_by_role("button", name="Light").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 20, 18)"


def test_a_step_of_rollouts_is_handed_over_as_a_file(page: "Page", world: World) -> None:
    page.goto("/rollouts")
    page.get_by_role("link", name="rewarded", exact=True).first.click()
    with page.expect_download() as told:
        page.get_by_role("button", name="Export the step").click()
    assert re.fullmatch(r"rollouts-\d+\.jsonl", told.value.suggested_filename)
    assert told.value.path().read_text().startswith("{")
