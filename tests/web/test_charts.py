"""Curves in a real browser: those of one run and of several, drawn on as they grow, zoomed and moved along by pointer and by keyboard."""

import re
from typing import TYPE_CHECKING

import pytest

from bloomery.client import Client
from tests.web.world import World

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]


def test_a_run_shows_its_curves_what_came_of_it_and_what_happened(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.rewarded.id}")
    for title, measures in {
        "Loss": ["loss"],
        "Reward": ["reward/raw", "reward/raw_low", "reward/raw_high", "reward/filtered"],
        "Reward by component": ["reward/part/json"],
        "Distance to the beginning": ["kl/reference"],
        "Trainer and sampler": ["ratio/k3", "ratio/largest_difference"],
        "Importance ratio": ["ratio/mean"],
        "Agreement": ["agreement/held_share", "agreement/drawn_deviation"],
        "Tokens held to agreement": ["agreement/scored_tokens", "agreement/trainer_tokens"],
        "Entropy": ["rollouts/entropy_estimate"],
        "Length": ["rollouts/length"],
        "Shares of rollouts": ["groups/zero_variance_share", "ratio/clipped_share", "rollouts/cut_off_share"],
        "Staleness": ["lag/mean", "lag/max"],
        "Tokens by staleness": ["lag/tokens/0"],
        "Grading": ["grading/seconds_mean", "grading/seconds_max"],
        "Throughput": ["tokens/trained_per_s", "tokens/sampled_per_s"],
        "Idle": ["idle/trainer_share", "idle/rollouts_share"],
        "Versions that travelled": ["sync/bytes", "sync/whole_bytes"],
        "Learning rate": ["learning_rate"],
        "Gradient norm": ["gradient_norm"],
    }.items():
        chart = page.get_by_role("region", name=title, exact=True)
        chart.locator("canvas").wait_for()
        assert set(measures) <= set(chart.get_by_role("button").all_inner_texts()), title
    travelled = page.get_by_role("region", name="Versions that travelled")
    assert re.search(r"[\d.]+ MiB of [\d.]+ MiB, 100 %", travelled.inner_text()), "an adapter travels whole"
    came = page.get_by_role("region", name="What came of it")
    assert "reward" in came.inner_text()
    page.get_by_role("region", name="What happened").get_by_role("listitem").first.wait_for()


def test_curves_of_a_run_and_of_the_job_that_trained_it_lead_to_each_other_over_its_rollouts(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.rewarded.run}")
    page.get_by_role("link", name="rewarded", exact=True).click()
    page.wait_for_url(f"**/runs/{world.rewarded.id}")
    page.get_by_role("link", name="step by step").click()
    page.wait_for_url(f"**/rollouts/{world.rewarded.run}")
    page.get_by_role("link", name="Curves").click()
    page.get_by_role("region", name="Reward", exact=True).locator("canvas").wait_for()
    page.wait_for_url(f"**/runs/{world.rewarded.id}")


def test_runs_are_compared_on_one_axis_smoothed_and_over_time(page: "Page", world: World) -> None:
    page.goto("/runs")
    for name in ("taught", "rewarded"):
        page.get_by_role("checkbox", name=f"compare {name}").check()
    page.get_by_role("link", name="Compare 2").click()
    loss = page.get_by_role("region", name="Loss", exact=True)
    loss.locator("canvas").wait_for()
    assert {"taught: loss", "rewarded: loss"} <= set(loss.get_by_role("button").all_inner_texts())
    page.get_by_role("slider").fill("0.9")
    page.get_by_role("checkbox", name="logarithmic").check()
    page.get_by_role("combobox", name=re.compile("^Over")).select_option("time")
    address = page.url
    assert "smooth=0.9" in address
    assert "y=log" in address
    assert "x=time" in address
    page.reload()
    loss.locator("canvas").wait_for()
    assert page.get_by_role("checkbox", name="logarithmic").is_checked()


def test_what_is_set_differently_between_runs_is_told_and_nothing_else(page: "Page", world: World, client: Client) -> None:
    again = client.jobs.create(world.taught.spec.model_copy(update={"name": "taught-otherwise", "rank": 8, "seed": 2}))
    page.goto(f"/runs/compare?of={world.taught.id},{again.id}")
    page.get_by_text("3 settings differ", exact=True).wait_for()
    told = page.get_by_role("table").filter(has=page.get_by_role("columnheader", name="Setting")).locator("tbody tr")
    assert [line.locator("td").all_inner_texts() for line in told.all()] == [
        ["name", "taught", "taught-otherwise"],
        ["rank", "16", "8"],
        ["seed", "1", "2"],
    ]
    client.jobs.cancel(again.id)


def test_a_curve_is_drawn_on_where_it_is_and_stays_as_far_in_as_one_looked(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.taught.id}?smooth=0.5")
    loss = page.get_by_role("region", name="Loss", exact=True)
    canvas = loss.locator("canvas").first
    canvas.wait_for()
    page.get_by_role("region", name="Throughput", exact=True).locator("canvas").wait_for()
    before = canvas.element_handle()
    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50, steps=4)
    page.mouse.up()
    near = loss.locator("canvas").first.evaluate("drawn => drawn.toDataURL()")
    page.get_by_role("slider").fill("0.9")
    assert before.evaluate("drawn => drawn.isConnected")
    assert "smooth=0.9" in page.url
    loss.locator(".u-over").dblclick()
    assert loss.locator("canvas").first.evaluate("drawn => drawn.toDataURL()") != near


def test_a_chart_is_zoomed_and_moved_along_by_keyboard_and_says_what_it_shows(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.taught.id}")
    loss = page.get_by_role("region", name="Loss", exact=True)
    chart = loss.get_by_role("application")
    loss.locator("canvas").wait_for()
    page.get_by_role("region", name="Throughput", exact=True).locator("canvas").wait_for()
    described = chart.get_attribute("aria-describedby")
    assert (
        page.locator(f"[id='{described}']").inner_text()
        == "plus and minus zoom, the arrow keys move along and with Shift go from value to value, 0 shows all; the buttons below hide lines"
    )
    chart.focus()
    whole = drawn(loss)
    shown: list[tuple[float, float]] = []
    for key in ("+", "+", "ArrowRight", "ArrowLeft", "-"):
        page.keyboard.press(key)
        shown.append(spans(loss.get_by_role("status").inner_text())[0])
    first, last = spans(loss.get_by_role("status").inner_text())[1]
    sizes = [end - begin for begin, end in shown]
    assert sizes == pytest.approx([size * (last - first) for size in (1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 2)], abs=0.2)
    assert shown[2][0] - shown[1][0] == pytest.approx((last - first) / 16, abs=0.2)
    assert shown[3] == shown[1]
    assert shown[4] == shown[0]
    near = drawn(loss)
    assert near != whole
    for key in ("Home", "+", "0"):
        page.keyboard.press(key)
    assert spans(loss.get_by_role("status").inner_text())[0] == (first, last)
    page.wait_for_function("([canvas, before]) => canvas.toDataURL() === before", arg=[loss.locator("canvas").element_handle(), whole])


def test_arrow_keys_move_a_chart_that_has_the_focus_and_turn_steps_where_there_is_nothing_to_move(page: "Page", world: World) -> None:
    page.goto(f"/rollouts/{world.rewarded.run}?step=2")
    chart = page.get_by_role("region", name="rewards by step").get_by_role("application")
    chart.locator("canvas").wait_for()
    steps = page.get_by_role("combobox", name=re.compile("^Step"))
    assert steps.input_value() == "2"
    chart.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert steps.input_value() == "2"
    page.keyboard.press("0")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**step=3")


def test_a_line_is_hidden_and_shown_again_by_keyboard(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.rewarded.id}")
    reward = page.get_by_role("region", name="Reward", exact=True)
    reward.locator("canvas").wait_for()
    page.get_by_role("region", name="Gradient norm", exact=True).locator("canvas").wait_for()
    whole = drawn(reward)
    reward.get_by_role("application").focus()
    page.keyboard.press("Tab")
    toggle = page.locator(":focus")
    assert (toggle.evaluate("each => each.tagName"), toggle.get_attribute("aria-pressed")) == ("BUTTON", "true")
    for key, pressed in (("Enter", "false"), ("Space", "true")):
        page.keyboard.press(key)
        assert toggle.get_attribute("aria-pressed") == pressed
        assert (drawn(reward) == whole) == (pressed == "true")
    page.keyboard.press("Enter")
    page.get_by_role("checkbox", name="logarithmic").check()
    page.wait_for_url("**y=log**")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    buttons = reward.locator(".u-legend button")
    assert [each.get_attribute("aria-pressed") for each in buttons.all()] == ["false", *["true"] * (buttons.count() - 1)]


def test_keys_of_a_chart_are_called_by_their_names(page: "Page", world: World) -> None:
    page.goto(f"/runs/{world.taught.id}")
    chart = page.get_by_role("region", name="Loss", exact=True).get_by_role("application")
    # A plus sign stands between keys that are held together, and is itself called so.
    assert chart.get_attribute("aria-keyshortcuts") == "Plus - ArrowLeft ArrowRight Shift+ArrowLeft Shift+ArrowRight 0 Home"


def test_bars_are_told_as_a_table_too(page: "Page", world: World, client: Client) -> None:
    run = client.run(world.rewarded.run or "")
    step = run.rollouts.steps()[0]
    page.goto(f"/rollouts/{run.id}?step={step.step}")
    table = page.get_by_role("table", name="reward of a rollout")
    table.wait_for()
    counts = table.get_by_role("row").locator("td").all_inner_texts()
    assert sum(map(int, counts)) == step.rollouts


def drawn(chart: "Locator") -> str:
    """What its lines look like."""
    return str(chart.locator("canvas").evaluate("canvas => new Promise(done => requestAnimationFrame(() => done(canvas.toDataURL())))"))


def spans(said: str) -> list[tuple[float, float]]:
    """What is shown, and of what."""
    return [(float(begin.replace(",", "")), float(end.replace(",", ""))) for begin, end in re.findall(r"([\d.,]+) to ([\d.,]+)", said)]
