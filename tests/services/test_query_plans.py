"""Queries whose tables grow for ever find their rows by an index."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, forget_old, was_done
from bloomery.services.data.feedback import _check_metric
from bloomery.services.data.span_filter import SpanFilter
from bloomery.services.data.span_sums import PERIOD_US, forget_spans, traffic_report
from bloomery.services.data.traffic import _ordered
from bloomery.services.evaluations.counts import uncounted
from bloomery.services.held import held_blobs, require_kept
from bloomery.services.housekeeping.ephemeral import Keeping, is_due
from bloomery.services.jobs.followed import told_since
from bloomery.services.jobs.job_rows import change_us
from bloomery.services.training.rollouts import forget_old as forget_old_rollouts
from bloomery.services.training.run_rows import run_of_request
from bloomery.services.weights.deployments import _swaps_of
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Gone
from bloomery.types.traffic import SpanOrder

Work = Callable[[Connection], object]
_ANY = SpanFilter()


def plan(tmp_path: Path, work: Work, *, change: bool = False) -> str:
    """How SQLite goes about every statement of the work, which only a `change` may write."""

    def explain(connection: Connection) -> list[str]:
        asked: list[tuple[str, Any]] = []
        event.listen(connection, "before_cursor_execute", lambda _1, _2, statement, parameters, _3, _4: asked.append((statement, parameters)))
        work(connection)
        steps = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all() for statement, parameters in list(asked)]
        assert steps
        return [row.detail for found in steps for row in found]

    with Database(tmp_path / "bloomery.db") as database:
        return "\n".join(asyncio.run((database.write if change else database.read)(explain)))


def listed(tmp_path: Path, order: SpanOrder, wanted: SpanFilter = _ANY) -> str:
    """How a page of requests is found."""
    query = _ordered("p", wanted, order).limit(50)
    return plan(tmp_path, lambda connection: connection.execute(query).all())


def looks(found: str) -> list[str]:
    """How a plan reads spans."""
    return re.findall(r"(?:SCAN|SEARCH) span\b.*", found)


def test_the_values_of_a_metric_are_found_by_it(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: _check_metric(connection, {"project": "p", "metric": "m", "type": "bool"}))
    assert "USING INDEX feedback_by_metric (project=? AND metric=?)" in found
    assert "B-TREE" not in found, "the latest is not the first that is read"


def test_who_names_a_blob_is_found_by_it(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: held_blobs(connection, ["a", "b"]))
    assert "checkpoint_by_key (key=?)" in found
    assert "sampling_session_by_key (key=?)" in found


def test_weights_that_are_to_be_held_are_found_by_their_blob(tmp_path: Path) -> None:
    def hold(connection: Connection) -> None:
        with pytest.raises(Gone):
            require_kept(connection, "gone")

    assert "checkpoint_by_key (key=?)" in plan(tmp_path, hold)


def test_samplers_that_let_go_are_not_read_again(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: is_due(connection, Keeping(), 0))
    assert "SCAN sampling_session" not in found


def test_a_request_that_comes_again_is_found_by_its_key(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: run_of_request(connection, "p", Repeatable("key", "hash")))
    assert "sqlite_autoindex_alias_1 (project=? AND contract=? AND name=?)" in found


def test_what_a_request_was_answered_is_found_by_its_key_and_forgotten_by_its_age(tmp_path: Path) -> None:
    caller = Principal("p", "key", frozenset())
    found = plan(tmp_path, lambda connection: was_done(connection, caller, Repeatable("key", "hash")))
    assert "sqlite_autoindex_answered_1 (project=? AND key_id=? AND name=?)" in found
    assert "answered_by_time (created_us<?)" in plan(tmp_path, lambda connection: forget_old(connection, 0), change=True)


def test_runs_whose_rollouts_became_more_are_found_by_when(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: forget_old_rollouts(connection, 1, 1), change=True)
    assert "rollout_step_by_time (created_us>?)" in found


def test_what_a_job_was_told_to_have_measured_is_found_by_when(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: told_since(connection, "job", 0))
    assert found.count("job_point_by_time (job_id=? AND created_us>?") == 2, found


def test_the_last_change_of_any_job_is_known_without_a_look_at_each(tmp_path: Path) -> None:
    assert "SEARCH job USING COVERING INDEX job_by_change" in plan(tmp_path, change_us)


def test_the_swaps_of_a_deployment_are_found_by_it_and_are_in_their_order(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: connection.execute(_swaps_of("p", "deployment")).all())
    assert "event_by_subject (subject=?)" in found
    assert "B-TREE" not in found


def test_the_dearest_requests_are_found_without_those_that_have_no_cost(tmp_path: Path) -> None:
    assert "USING INDEX span_by_cost (project=?" in listed(tmp_path, "dearest")


def test_the_slowest_requests_are_the_first_that_are_read(tmp_path: Path) -> None:
    assert "USING INDEX span_by_duration (project=?" in listed(tmp_path, "slowest")


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (SpanFilter(), "span_by_project (project=?)"),
        (SpanFilter(since_us=1, until_us=2), "span_by_project (project=? AND started_us>? AND started_us<?)"),
        (SpanFilter(kinds=("chat", "completion")), "span_served (project=?)"),
        (SpanFilter(kinds=("chat", "completion"), since_us=1), "span_served (project=? AND started_us>?)"),
        (SpanFilter(kinds=("chat", "completion"), status="error"), "span_failed (project=?)"),
        (SpanFilter(kinds=("chat", "completion"), deployment="d"), "span_by_deployment (project=? AND deployment_id=?)"),
        (SpanFilter(kinds=("sample",), version="v"), "span_by_version (project=? AND version=?)"),
        (SpanFilter(kinds=("chat", "completion"), base="b"), "span_by_version (project=? AND version=?)"),
    ],
)
def test_the_newest_requests_that_are_meant_are_the_first_that_are_read(tmp_path: Path, wanted: SpanFilter, index: str) -> None:
    assert looks(listed(tmp_path, "newest", wanted)) == [f"SEARCH span USING INDEX {index}"]


@pytest.mark.parametrize(("order", "index"), [("slowest", "span_by_duration"), ("dearest", "span_by_cost")])
def test_the_slowest_and_the_dearest_of_those_that_were_served_are_found_by_that(tmp_path: Path, order: SpanOrder, index: str) -> None:
    assert f"USING INDEX {index} (project=?" in listed(tmp_path, order, SpanFilter(kinds=("chat", "completion")))


@pytest.mark.parametrize("order", ["slowest", "dearest"])
@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (SpanFilter(kinds=("chat",), deployment="d"), "span_by_deployment (project=? AND deployment_id=?)"),
        (SpanFilter(kinds=("chat",), version="v"), "span_by_version (project=? AND version=?)"),
        (SpanFilter(kinds=("chat",), base="b"), "span_by_version (project=? AND version=?)"),
        (SpanFilter(kinds=("chat",), episode="e"), "span_by_episode (project=? AND episode_id=?)"),
    ],
)
def test_of_few_requests_none_but_these_are_put_in_order(tmp_path: Path, order: SpanOrder, wanted: SpanFilter, index: str) -> None:
    assert looks(listed(tmp_path, order, wanted)) == [f"SEARCH span USING INDEX {index}"]


@pytest.mark.parametrize("wanted", [SpanFilter(), SpanFilter(kinds=("chat",), status="ok", version="v", deployment="d"), SpanFilter(base="b")])
def test_what_requests_come_to_is_known_without_a_look_at_any(tmp_path: Path, wanted: SpanFilter) -> None:
    found = plan(tmp_path, lambda connection: traffic_report(connection, "p", wanted))
    assert "SEARCH span_sum USING INDEX sqlite_autoindex_span_sum_1 (project=?)" in found
    assert looks(found) == []


def test_of_requests_in_some_time_those_alone_are_read_that_are_near_its_ends(tmp_path: Path) -> None:
    within = SpanFilter(since_us=PERIOD_US // 2, until_us=9 * PERIOD_US // 2)
    found = plan(tmp_path, lambda connection: traffic_report(connection, "p", within))
    assert "SEARCH span_sum USING INDEX sqlite_autoindex_span_sum_1 (project=? AND began_us>? AND began_us<?)" in found
    assert looks(found) == ["SEARCH span USING INDEX span_by_project (project=? AND started_us>? AND started_us<?)"] * 2


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (SpanFilter(episode="e"), "span_by_episode (project=? AND episode_id=?)"),
        (SpanFilter(min_cost_usd=1.0), "span_by_cost (project=? AND cost_usd>?)"),
    ],
)
def test_what_an_episode_or_the_dearest_come_to_is_read_of_these_alone(tmp_path: Path, wanted: SpanFilter, index: str) -> None:
    found = plan(tmp_path, lambda connection: traffic_report(connection, "p", wanted))
    assert looks(found) == [f"SEARCH span USING INDEX {index}"]


def test_spans_that_go_are_found_by_their_time(tmp_path: Path) -> None:
    found = plan(tmp_path, lambda connection: forget_spans(connection, rows.span.c.retention_until_us < 0), change=True)
    assert looks(found) == ["SEARCH span USING INDEX span_by_retention (retention_until_us<?)"]


def test_evaluations_whose_numbers_are_not_kept_yet_are_found_without_the_others(tmp_path: Path) -> None:
    assert "USING INDEX evaluation_uncounted" in plan(tmp_path, uncounted)
