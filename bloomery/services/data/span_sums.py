"""What recorded spans come to, of which sums are kept as they are written.

A sum is of the spans that began in the same ten minutes and agree in all that most totals are asked by. Totals are read again whenever a page hears
of new spans, so what was recorded before must not make them slower: they are put together of sums, and of the spans of the ten minutes in which the
asked time begins or ends. Only totals of an episode, or from some cost on, read all spans that are meant, which an index finds.

Whoever writes spans calls `add_spans` in the same transaction, and whoever deletes some has `forget_spans` do so, which counts again what is left: a
sum that was subtracted from would keep the rounding of what is gone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, case, delete, func, insert, literal, select, update

from bloomery.services.data.span_filter import SpanFilter, of_spans, what_is_summed
from bloomery.store import rows
from bloomery.types.traffic import DeploymentTotals, TrafficReport, TrafficTotals

PERIOD_US: Final = 600_000_000
_ALIKE: Final = ("kind", "status", "version")
_ADDED: Final = ("in_tokens", "cached_tokens", "out_tokens", "duration_us", "cost_usd")
_FIGURES: Final = ("requests", "priced", *_ADDED)


def add_spans(connection: Connection, spans: Iterable[Mapping[str, Any]]) -> None:
    """Count spans that are written now, by the values of their rows."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        began_us = span["started_us"] // PERIOD_US * PERIOD_US
        alike[span["project"], began_us, span.get("deployment_id") or "", *(span[name] for name in _ALIKE)].append(span)
    table = rows.span_sum.c
    for values, some in alike.items():
        key = dict(zip(("project", "began_us", "deployment_id", *_ALIKE), values, strict=True))
        figures = _figures_of(some)
        more = update(rows.span_sum).where(*(table[name] == value for name, value in key.items()))
        if not rows.changed(connection, more.values({name: table[name] + value for name, value in figures.items()})):
            connection.execute(insert(rows.span_sum), key | figures)


def forget_spans(connection: Connection, condition: ColumnElement[bool]) -> int:
    """Delete the spans of which this holds; how many there were."""
    span = rows.span.c
    began_us = span.started_us - span.started_us % PERIOD_US
    # As it is, the project would have SQLite read every span in the order of projects, to find those that are distinct.
    query = select((span.project + "").label("project"), began_us.label("began_us"))
    periods = connection.execute(query.where(condition).distinct()).all()
    gone = connection.execute(delete(rows.span).where(condition)).rowcount if periods else 0
    for period in periods:
        _count_again(connection, period.project, period.began_us)
    return gone


def traffic_report(connection: Connection, project: str, wanted: SpanFilter) -> TrafficReport:
    """What the spans of a project that are meant come to."""
    by_name: dict[str | None, list[Row[Any]]] = defaultdict(list)
    for query in _queries(project, wanted):
        for row in connection.execute(query):
            by_name[row.deployment].append(row)
    deployments = [DeploymentTotals(deployment=name, **_totals(found)) for name, found in by_name.items()]
    total = TrafficTotals(**_totals([row for found in by_name.values() for row in found]))
    return TrafficReport(total=total, deployments=sorted(deployments, key=lambda each: (-each.requests, each.deployment or "")))


def _count_again(connection: Connection, project: str, began_us: int) -> None:
    table, span = rows.span_sum.c, rows.span.c
    connection.execute(delete(rows.span_sum).where(table.project == project, table.began_us == began_us))
    key: list[Any] = [literal(project), literal(began_us), func.coalesce(span.deployment_id, ""), *(span[name] for name in _ALIKE)]
    added = [func.coalesce(func.sum(span[name]), 0) for name in _ADDED]
    within = (span.project == project, span.started_us >= began_us, span.started_us < began_us + PERIOD_US)
    left = select(*key, func.count(), func.count(span.cost_usd), *added).where(*within).group_by(span.deployment_id, *key[3:])
    connection.execute(insert(rows.span_sum).from_select(["project", "began_us", "deployment_id", *_ALIKE, *_FIGURES], left))


def _figures_of(spans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = {name: [value for span in spans if (value := span.get(name)) is not None] for name in _ADDED}
    sums = {name: math.fsum(values) if name == "cost_usd" else sum(values) for name, values in known.items()}
    return {"requests": len(spans), "priced": len(known["cost_usd"]), **sums}


def _queries(project: str, wanted: SpanFilter) -> Iterator[Select[Any]]:
    """They have a row of each deployment, and one of what was asked of none."""
    if (wanted.episode, wanted.min_cost_usd) != (None, None):
        yield _of_spans(project, wanted)
        return
    start_us, stop_us = _whole(wanted)
    table = rows.span_sum.c
    within = [table.began_us >= start_us] if start_us is not None else []
    within += [table.began_us < stop_us] if stop_us is not None else []
    # Empty where all of the time lies within one period.
    yield _grouped(rows.span_sum, func.sum(table.requests), func.sum(table.priced)).where(*what_is_summed(project, wanted, table), *within)
    if start_us is not None and stop_us is not None and start_us > stop_us:
        yield _of_spans(project, wanted)
        return
    if start_us is not None and start_us != wanted.since_us:
        yield _of_spans(project, replace(wanted, until_us=start_us))
    if stop_us is not None and stop_us != wanted.until_us:
        yield _of_spans(project, replace(wanted, since_us=stop_us))


class _Whole(NamedTuple):
    """The periods that are meant whole: where the first begins, and the first behind them; None where time has no bound."""

    start_us: int | None
    stop_us: int | None


def _whole(wanted: SpanFilter) -> _Whole:
    start_us = None if wanted.since_us is None else -(-wanted.since_us // PERIOD_US) * PERIOD_US
    stop_us = None if wanted.until_us is None else wanted.until_us // PERIOD_US * PERIOD_US
    return _Whole(start_us, stop_us)


def _of_spans(project: str, wanted: SpanFilter) -> Select[Any]:
    return _grouped(rows.span, func.count(), func.count(rows.span.c.cost_usd)).where(*of_spans(project, wanted))


def _grouped(table: Any, requests: Any, priced: Any) -> Select[Any]:
    columns = table.c
    errors = func.sum(case((columns.status == "error", 1 if table is rows.span else columns.requests), else_=0))
    figures = [requests.label("requests"), priced.label("priced"), errors.label("errors"), *(func.sum(columns[name]).label(name) for name in _ADDED)]
    joined = table.outerjoin(rows.deployment, columns.deployment_id == rows.deployment.c.id)
    return select(rows.deployment.c.name.label("deployment"), *figures).select_from(joined).group_by(rows.deployment.c.name)


def _totals(found: Sequence[Row[Any]]) -> dict[str, Any]:
    """Postgres adds whole numbers up to decimals."""
    counted = {name: sum(int(row._mapping[name] or 0) for row in found) for name in ("requests", "errors", "priced", *_ADDED[:3])}
    seconds = sum(int(row.duration_us or 0) for row in found) / 1e6
    return counted | {"seconds": seconds, "cost_usd": math.fsum(row.cost_usd or 0.0 for row in found) if counted["priced"] else None}
