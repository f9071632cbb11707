"""Curves of numbers that are known: their axes, intervals, piles, colours and last values, points that lead to rollouts, and what comes meanwhile."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sqlalchemy import create_engine, insert

from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.recipes.sft import datum
from bloomery.store import rows
from bloomery.types.arrays import Array
from bloomery.types.rollouts import RecordedGroup, RecordedRollout, RecordedSegment, RecordedStep
from tests.live import LiveServer, wait_until
from tests.web.world import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]
BEGAN_US = 1_700_000_000_000_000
DAY_US = 86_400_000_000
SHADE = 0x2B
"""How opaque an interval is, of 255."""
INK = """(canvas, opacity) => new Promise((done) => requestAnimationFrame(() => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 3; i < data.length; i += 4) count += opacity === null ? data[i] > 0 : data[i] === opacity;
    done(count);
}))"""
"""How many pixels are drawn at all, or that opaque."""


def test_the_interval_of_a_mean_is_shaded_around_it(page: "Page", server: LiveServer, client: Client) -> None:
    mean, low, high = [0.2, 0.4, 0.5, 0.7], [0.1] * 4, [0.9] * 4
    run = measured(server, client, "banded", {"reward/raw": mean, "reward/raw_low": low, "reward/raw_high": high, "reward/group_std": mean})
    page.goto(f"/runs/{run}")
    reward = shown(page, "Reward")
    assert reward.get_by_role("button").all_inner_texts() == ["reward/raw", "reward/raw_low", "reward/raw_high"]
    assert ink(reward, SHADE) > 1000
    reward.get_by_role("button", name="reward/raw_low").click()
    assert ink(reward, SHADE) < 100
    assert shown(page, "Spread of rewards").get_by_role("button").all_inner_texts() == ["reward/group_std"]
    assert page.get_by_text("more measures").count() == 0


def test_tokens_by_staleness_stand_on_each_other_and_say_their_own_numbers(page: "Page", server: LiveServer, client: Client) -> None:
    run = measured(server, client, "stale", {"lag/tokens/0": [30, 5], "lag/tokens/10": [10, 5], "lag/tokens/2": [20, None]})
    page.goto(f"/runs/{run}")
    stale = shown(page, "Tokens by staleness")
    assert stale.get_by_role("button").all_inner_texts() == ["lag/tokens/0", "lag/tokens/2", "lag/tokens/10"]
    assert walk(page, stale, "Right") == "step 1: lag/tokens/0 30, lag/tokens/2 20, lag/tokens/10 10"
    zero, two, ten = heights(stale)
    assert (zero / ten, two / ten) == pytest.approx((60 / 10, 30 / 10), rel=0.1)
    stale.get_by_role("button", name="lag/tokens/2").click()
    assert walk(page, stale, "Right") == "step 1: lag/tokens/0 30, lag/tokens/10 10"
    zero, _, ten = heights(stale)
    assert zero / ten == pytest.approx(40 / 10, rel=0.1), "what is hidden carries nothing"
    page.get_by_role("checkbox", name="logarithmic").check()
    page.wait_for_url("**y=log**")
    walk(page, stale, "Right")
    zero, _, ten = heights(stale)
    assert zero / ten == pytest.approx(math.log(30 / 5) / math.log(10 / 5), rel=0.05), "of logarithms there are no sums"


def test_a_logarithmic_axis_has_the_same_distance_between_doubles(page: "Page", server: LiveServer, client: Client) -> None:
    run = measured(server, client, "logarithms", {"loss": [8, 4, 3, 2, 1.5, 1.2, 1.1, 1]})
    page.goto(f"/runs/{run}")

    def places() -> list[tuple[float, float]]:
        """Of steps 1, 2, 4 and 8, whose losses are 8, 4, 2 and 1."""
        found = []
        for step in range(1, 9):
            assert walk(page, shown(page, "Loss"), "Right").startswith(f"step {step}: ")
            found.append(points(shown(page, "Loss"))[0])
        return [found[step - 1] for step in (1, 2, 4, 8)]

    linear = places()
    assert gaps(linear, 0) == pytest.approx([gaps(linear, 0)[2] / times for times in (4, 2, 1)], abs=3)
    assert gaps(linear, 1) == pytest.approx([gaps(linear, 1)[0] / times for times in (1, 2, 4)], abs=3)
    page.get_by_role("checkbox", name="logarithmic").check()
    page.wait_for_url("**y=log**")
    logarithmic = places()
    assert gaps(logarithmic, 1) == pytest.approx([gaps(logarithmic, 1)[0]] * 3, abs=3)
    assert gaps(logarithmic, 0) == pytest.approx(gaps(linear, 0), abs=3)
    page.get_by_role("combobox", name=re.compile("^Over")).select_option("steps, logarithmic")
    page.wait_for_url("**x=log**")
    both = places()
    assert gaps(both, 0) == pytest.approx([gaps(both, 0)[0]] * 3, abs=3)
    page.keyboard.press("+")
    zoomed = shown(page, "Loss").get_by_role("status").inner_text()
    assert re.fullmatch(r"1\.7 to 4\.8 of 1 to 8", zoomed), zoomed


def test_runs_of_two_days_begin_together_where_they_are_compared_over_time(page: "Page", server: LiveServer, client: Client) -> None:
    first = measured(server, client, "yesterday", {"loss": [3, 2, 1]}, every_s=10)
    second = measured(server, client, "today", {"loss": [5, 4, 3]}, every_s=45, began_us=BEGAN_US + DAY_US)
    page.goto(f"/runs/compare?of={first},{second}")
    loss = shown(page, "Loss")
    page.get_by_role("combobox", name=re.compile("^Over")).select_option("time")
    page.wait_for_url("**x=time**")
    assert walk(page, loss, "Right") == "after 0 s: yesterday 3, today 5"
    page.keyboard.press("+")
    assert loss.get_by_role("status").inner_text().endswith(" of 0 s to 1 min 30 s")
    page.goto(f"/runs/{first}?x=time")
    assert re.match(r"time 11/1[45]/2023", walk(page, shown(page, "Loss"), "Right")), "of one run it is told when that was"


def test_measures_that_are_compared_differ_in_colour_and_runs_in_how_their_lines_are_broken(page: "Page", server: LiveServer, client: Client) -> None:
    names = ["groups/zero_variance_share", "ratio/clipped_share", "rollouts/cut_off_share", "lag/masked_share", "grading/invalid_share"]
    values = {name: [(number + step % 7) / 20 for step in range(200)] for number, name in enumerate(names)}
    ids = [measured(server, client, name, {**values, "loss": values[names[0]]}) for name in ("solid", "broken")]
    page.goto(f"/runs/compare?of={','.join(ids)}")
    shares = shown(page, "Shares of rollouts")
    looks = shares.locator(".u-legend .u-marker").evaluate_all("all => all.slice(1).map(({ style }) => [style.borderColor, style.borderStyle])")
    assert len(looks) == 10
    assert len({tuple(look) for look in looks}) == 10
    assert [colour for colour, _ in looks[:5]] == [colour for colour, _ in looks[5:]]
    # Of two lines through the same points, the broken one is less ink.
    loss = shown(page, "Loss")
    left: dict[str, int] = {}
    for hidden, other in (("solid", "broken"), ("broken", "solid")):
        loss.get_by_role("button", name=hidden).click()
        left[other] = ink(loss)
        loss.get_by_role("button", name=hidden).click()
    assert left["broken"] < left["solid"]


def test_names_below_a_chart_have_the_last_values_where_no_pointer_is(page: "Page", server: LiveServer, client: Client) -> None:
    run = measured(server, client, "ends", {"loss": [3, 2, 1], "evaluation/loss": [None, 2.5, None]})
    page.goto(f"/runs/{run}")
    loss = shown(page, "Loss")
    assert told(loss) == ["last", "1", "2.5"]
    box = loss.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 2, box["y"] + 20)
    assert told(loss)[:2] == ["1", "3"]
    page.mouse.move(0, 0)
    assert told(loss) == ["last", "1", "2.5"]


def test_a_point_leads_to_the_rollouts_of_its_step_or_of_the_nearest_that_is_kept(page: "Page", server: LiveServer, client: Client) -> None:
    run = measured(server, client, "picked", {"reward/raw": [0.1, 0.9, 0.2, 0.8, 0.5]})
    for step, reward in {1: 0.125, 4: 0.75}.items():
        client.run(run).rollouts.add(step, sampled(reward))
    page.goto(f"/runs/{run}")
    reward = shown(page, "Reward")
    assert [walk(page, reward, "Left") for _ in range(3)] == ["step 5: reward/raw 0.5", "step 4: reward/raw 0.8", "step 3: reward/raw 0.2"]
    left, top = points(reward)[0]
    page.mouse.click(left, top - 40)
    assert page.url.endswith(f"/runs/{run}"), "that is beside it"
    page.mouse.click(left, top)
    page.wait_for_url(f"**/rollouts/{run}?step=4")
    page.get_by_text("reward 0.75 (0.75 to 0.75)").wait_for()
    rewards = page.get_by_role("region", name="rewards by step")
    rewards.locator("canvas").wait_for()
    page.mouse.move(0, 0)
    walk(page, rewards, "Right")
    left, top = points(rewards)[0]
    page.mouse.click(left + 2, top)
    page.wait_for_url(f"**/rollouts/{run}?step=1")
    page.get_by_text("reward 0.125 (0.125 to 0.125)").wait_for()
    page.get_by_role("link", name="Curves").click()
    page.wait_for_url(f"**/runs/{run}")
    page.get_by_role("link", name="step by step").click()
    page.wait_for_url(f"**/rollouts/{run}")


def test_enter_leads_to_the_rollouts_of_the_value_at_the_pointer_over_time_too(page: "Page", server: LiveServer, client: Client) -> None:
    run = measured(server, client, "entered", {"reward/raw": [0.1, 0.9, 0.2]})
    for step in (1, 2, 3):
        client.run(run).rollouts.add(step, sampled(step / 4))
    for over in ("", "?x=time"):
        page.goto(f"/runs/{run}{over}")
        reward = shown(page, "Reward")
        reward.get_by_role("button").first.focus()
        page.keyboard.press("Enter")
        assert reward.get_by_role("button").first.get_attribute("aria-pressed") == "false", "of a button it is a press"
        page.keyboard.press("Enter")
        assert reward.get_by_role("application").get_attribute("aria-keyshortcuts") == (
            "Plus - ArrowLeft ArrowRight Shift+ArrowLeft Shift+ArrowRight 0 Home Enter"
        )
        walk(page, reward, "Right")
        walk(page, reward, "Right")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/rollouts/{run}?step=2")


def test_what_is_measured_meanwhile_is_drawn_on(page: "Page", client: Client) -> None:
    run = client.create_run(BASE, 4, seed=1, name="grows")

    def trained() -> int:
        """One step more: which."""
        run.forward_backward([datum([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])])
        run.optim_step(1e-3).result()
        return [point.step for point in run.metrics() if "loss" in point.values][-1]

    trained()
    page.goto(f"/runs/{run.id}")
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    loss = shown(page, "Loss")
    assert walk(page, loss, "Left").startswith("step ")
    second = trained()
    wait_until(lambda: walk(page, loss, "Right").startswith(f"step {second}: loss "))
    # Nothing but that it was told leads to this one: what was read when the page had just been opened is there.
    third = trained()
    wait_until(lambda: walk(page, loss, "Right").startswith(f"step {third}: loss "))
    assert walk(page, loss, "Left").startswith(f"step {second}: loss ")


def test_a_step_that_is_sampled_meanwhile_is_turned_to_where_the_newest_is_read(page: "Page", client: Client) -> None:
    run = client.create_run(BASE, 4, name="samples")
    run.rollouts.add(1, sampled(0.125))
    page.goto(f"/rollouts/{run.id}")
    page.get_by_role("navigation").get_by_text("live", exact=True).wait_for()
    page.get_by_text("reward 0.125 (0.125 to 0.125)").wait_for()
    steps = page.get_by_role("combobox", name=re.compile("^Step"))
    run.rollouts.add(2, sampled(0.25))
    wait_until(lambda: steps.locator("option").all_inner_texts() == ["the newest, as it comes", "1", "2"])
    assert steps.input_value() == "1", "who reads is not disturbed"
    steps.select_option("newest")
    page.get_by_text("reward 0.25 (0.25 to 0.25)").wait_for()
    run.rollouts.add(3, sampled(0.375))
    page.get_by_text("reward 0.375 (0.375 to 0.375)").wait_for()


def measured(
    server: LiveServer, client: Client, name: str, values: Mapping[str, Sequence[float | None]], *, began_us: int = BEGAN_US, every_s: float = 1
) -> str:
    """A run of which that was measured, from step 1 on."""
    run = client.create_run(BASE, 4, name=name).id
    found = [
        {"project": rows.DEFAULT_PROJECT, "run_id": run, "seq": step, "name": measure, "step": step, "value": value}
        | {"created_us": began_us + round((step - 1) * every_s * 1e6)}
        for measure, each in values.items()
        for step, value in enumerate(each, 1)
    ]
    engine = create_engine(f"sqlite:///{DataDir(server.data_dir).database}", connect_args={"timeout": 60})
    with engine.begin() as connection:
        connection.execute(insert(rows.run_metric), found)
    engine.dispose()
    return run


def sampled(reward: float) -> RecordedStep:
    """One rollout, which got that."""
    segment = RecordedSegment(
        tokens=Array.of(np.asarray([5, 6], "int32")),
        sampled=((0, 2),),
        logprobs=Array.of(np.asarray([-0.5, -0.1], "float32")),
        versions=((0, 2, "a" * 64),),
        after_prompt=True,
    )
    rollout = RecordedRollout(id="0.0", segments=(segment,), stopped=True, reward=reward)
    return RecordedStep(groups=(RecordedGroup(number=0, problem="one", prompt=Array.of(np.asarray([5], "int32")), rollouts=(rollout,)),))


def shown(page: "Page", title: str) -> "Locator":
    chart = page.get_by_role("region", name=title, exact=True)
    chart.locator("canvas").wait_for()
    return chart


def walk(page: "Page", chart: "Locator", where: str) -> str:
    """Go to the value beside the pointer, by keyboard; what is said of it."""
    chart.get_by_role("application").focus()
    page.keyboard.press(f"Shift+Arrow{where}")
    return str(chart.get_by_role("status").inner_text())


def points(chart: "Locator") -> list[tuple[float, float]]:
    """Where the values at the pointer are, line by line."""
    boxes = chart.locator(".u-cursor-pt").evaluate_all("all => all.map((each) => each.getBoundingClientRect().toJSON())")
    return [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes]


def heights(chart: "Locator") -> list[float]:
    """How far above the foot they are."""
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    return [box["y"] + box["height"] - top for _, top in points(chart)]


def gaps(places: Sequence[tuple[float, float]], axis: int) -> list[float]:
    return [abs(after[axis] - before[axis]) for before, after in itertools.pairwise(places)]


def told(chart: "Locator") -> list[str]:
    return list(chart.locator(".u-legend .u-value").all_inner_texts())


def ink(chart: "Locator", opacity: int | None = None) -> int:
    return int(chart.locator("canvas").evaluate(INK, opacity))
