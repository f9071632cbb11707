"""The sums that are kept of recorded spans are what the spans come to, whatever was written, written again or deleted meanwhile."""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from bloomery.services.data.span_filter import SpanFilter
from bloomery.services.data.span_rows import Inference, RecordedSample
from bloomery.services.data.span_sums import PERIOD_US, traffic_report
from bloomery.store.database import Database
from bloomery.store.migrations import migrate
from bloomery.types.ids import now_us
from bloomery.types.resources import Price, Span
from bloomery.types.traffic import DeploymentTotals, TrafficReport, TrafficTotals
from tests.services.stage import BASE, ME, STRANGER, Stage, chat, play

NOW = now_us()
DAY_US = 86_400_000_000
TIMES = (NOW - 40 * DAY_US, NOW - 31 * DAY_US, *(NOW - minutes * 60_000_000 for minutes in (1, 4, 11, 19, 33, 60, 300)))
"""The first two are past their retention."""


def filters() -> Iterator[SpanFilter]:
    """Of every kind, with bounds inside, at the ends of and across the periods that are summed."""
    yield from (
        SpanFilter(episode="e"),
        SpanFilter(min_cost_usd=50e-6),
        SpanFilter(kinds=("sample",)),
        SpanFilter(deployment="nobody"),
        SpanFilter(base=BASE),
    )
    yield from (SpanFilter(deployment=name, status=status) for name, status in product((None, "front"), (None, "ok", "error")))
    edge = NOW // PERIOD_US * PERIOD_US
    bounds = (None, NOW - 61 * 60_000_000, edge - 2 * PERIOD_US, edge - 1, edge, NOW - 5 * 60_000_000, NOW)
    yield from (SpanFilter(since_us=since, until_us=until, kinds=("chat", "sample")) for since, until in product(bounds, bounds))


def spans(target: Any, count: int, seed: int) -> list[Inference]:
    draw = random.Random(seed)
    return [
        chat(
            f"{kind}-{draw.randrange(3 * count)}" if (kind := draw.choice(("chat", "sample"))) == "sample" else f"chatcmpl-{seed}-{number}",
            kind=kind,
            started_us=draw.choice(TIMES) + draw.randrange(1000),
            status=draw.choice(("ok", "ok", "error", "cancelled")),
            episode_id=draw.choice((None, "e")),
            cached_tokens=draw.randrange(3),
            duration_us=draw.randrange(10**6),
            samples=[RecordedSample([4] * draw.randrange(5), [], "stop")],
            **({"target": target} if target is not None and draw.random() < 0.5 else {}),
        )
        for number in range(count)
    ]


def summed(found: Sequence[Span]) -> TrafficReport:
    """The same, of the spans themselves."""
    by_name: dict[str | None, list[Span]] = defaultdict(list)
    for span in found:
        by_name[span.deployment].append(span)
    deployments = [DeploymentTotals(deployment=name, **_figures(some)) for name, some in by_name.items()]
    return TrafficReport(
        total=TrafficTotals(**_figures(found)), deployments=sorted(deployments, key=lambda each: (-each.requests, each.deployment or ""))
    )


def _figures(found: Sequence[Span]) -> dict[str, Any]:
    costs = [span.cost_usd for span in found if span.cost_usd is not None]
    counted = {name: sum(getattr(span, name) for span in found) for name in ("in_tokens", "cached_tokens", "out_tokens")}
    counted |= {"requests": len(found), "errors": sum(span.status == "error" for span in found), "priced": len(costs)}
    return counted | {"seconds": sum(span.duration_us or 0 for span in found) / 1e6, "cost_usd": math.fsum(costs) if costs else None}


def rounded(found: TrafficReport) -> TrafficReport:
    """Sums of the same costs in another order differ in their last digits."""
    whole = found.model_dump()
    for figures in (whole["total"], *whole["deployments"]):
        figures["cost_usd"] = figures["cost_usd"] and float(f"{figures['cost_usd']:.12g}")
    return TrafficReport.model_validate(whole)


async def hold(stage: Stage) -> None:
    for wanted in filters():
        listed = (await stage.traffic.list(ME, wanted, limit=10_000)).data
        assert rounded(await stage.traffic.totals(ME, wanted)) == rounded(summed(listed)), wanted


def test_sums_are_what_the_spans_come_to(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.deployments.create(ME, "front", "tiny", {})
        await stage.deployments.set_price(ME, "front", Price(prompt_usd_per_mtok=8.0, completion_usd_per_mtok=32.1))
        target = await stage.deployments.target(ME, "front")
        # Samples that are written again have other figures then, and often another time.
        for seed in range(3):
            for span in [*spans(target, 80, seed), chat(f"chatcmpl-theirs-{seed}", project=STRANGER.project, started_us=NOW)]:
                stage.traffic.record(span)
            await hold(stage)
        assert (await stage.traffic.totals(STRANGER)).total.requests == 3
        before = (await stage.traffic.totals(ME)).total
        assert (await stage.garbage.collect(ME)).spans > 20
        await hold(stage)
        after = (await stage.traffic.totals(ME)).total
        assert 0 < after.requests < before.requests

    play(tmp_path, story)


def test_where_all_is_gone_nothing_is_left_of_the_sums(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for span in spans(None, 50, 1):
            stage.traffic.record(span)
        await stage.traffic.flush()
        await stage.database.write(lambda connection: connection.exec_driver_sql("UPDATE span SET retention_until_us = 0"))
        await stage.garbage.collect(ME)
        assert await stage.traffic.totals(ME) == summed([])
        assert await stage.database.read(lambda connection: connection.exec_driver_sql("SELECT count(*) FROM span_sum").scalar()) == 0

    play(tmp_path, story)


@pytest.mark.parametrize("revision", ["0019", "0024"])
def test_spans_of_an_earlier_schema_are_summed(tmp_path: Path, revision: str) -> None:
    known = {"project": "p", "kind": "chat", "name": "chat", "model": "m", "version": "v", "base_hash": "b", "tags": "{}", "consent": "none"}
    known |= {"redaction_ver": "1", "redacted": 0, "in_tokens": 3, "out_tokens": 5, "cached_tokens": 1}
    each = [
        {"id": "a", "status": "ok", "started_us": PERIOD_US - 1, "duration_us": 2_000_000, "cost_usd": 0.5},
        {"id": "b", "status": "error", "started_us": PERIOD_US, "duration_us": None, "cost_usd": None},
        {"id": "c", "status": "ok", "started_us": PERIOD_US + 1, "duration_us": 1_000_000, "cost_usd": 0.25},
    ]
    engine = create_engine(f"sqlite:///{tmp_path / 'db'}")
    with engine.begin() as connection:
        migrate(connection, revision)
        for row in (known | span for span in each):
            connection.exec_driver_sql(f"INSERT INTO span ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    engine.dispose()
    with Database(tmp_path / "db") as database:
        reports = [
            asyncio.run(database.read(lambda c, w=wanted: traffic_report(c, "p", w))) for wanted in (SpanFilter(), SpanFilter(since_us=PERIOD_US))
        ]
    whole, later = (found.total for found in reports)
    assert (whole.requests, whole.errors, whole.priced, whole.in_tokens, whole.out_tokens) == (3, 1, 2, 9, 15)
    assert (whole.seconds, whole.cost_usd) == (3.0, 0.75)
    assert (later.requests, later.seconds, later.cost_usd) == (2, 1.0, 0.25)
