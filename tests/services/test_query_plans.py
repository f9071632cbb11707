"""Queries whose tables grow for ever find their rows by an index."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, forget_old, was_done
from bloomery.services.data.feedback import _check_metric
from bloomery.services.data.traffic import _ordered, _spans
from bloomery.services.evaluations.counts import uncounted
from bloomery.services.held import held_blobs, require_kept
from bloomery.services.housekeeping.ephemeral import Keeping, is_due
from bloomery.services.jobs.followed import told_since
from bloomery.services.jobs.job_rows import change_us
from bloomery.services.training.rollouts import forget_old as forget_old_rollouts
from bloomery.services.training.run_rows import run_of_request
from bloomery.store.database import Database
from bloomery.types.errors import Gone

Work = Callable[[Connection], object]


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


def test_the_dearest_requests_are_found_without_those_that_have_no_cost(tmp_path: Path) -> None:
    dearest = _ordered(_spans("p"), "dearest").limit(50)
    found = plan(tmp_path, lambda connection: connection.execute(dearest).all())
    assert "USING INDEX span_by_cost (project=?" in found


def test_evaluations_whose_numbers_are_not_kept_yet_are_found_without_the_others(tmp_path: Path) -> None:
    assert "USING INDEX evaluation_uncounted" in plan(tmp_path, uncounted)
