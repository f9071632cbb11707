"""What clients report of themselves goes into the log that everybody shares, within bounds."""

import logging
from typing import Any

import httpx
import pytest

from bloomery.api.routes.tinker.client import MAX_LOGGED
from tests.tinker.over_fake_engine import KEY, Served


def report(server: Served, *events: dict[str, Any]) -> None:
    body = {"session_id": "sessionless-1", "platform": "x", "sdk_version": "0.38.0", "process_uuid": "u", "events": events}
    answer = httpx.post(f"{server.url}/api/v1/telemetry", json=body, headers={"x-api-key": KEY})
    assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})


def loud(number: int, told: str = "boom") -> dict[str, Any]:
    return {"event": "GENERIC_EVENT", "event_name": f"odd-{number}", "severity": "ERROR", "event_data": {"exception": told}}


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of clients, by the server, which may have more to say meanwhile."""
    return [record for record in caplog.records if "a client reports" in record.getMessage()]


def test_of_many_errors_some_are_logged_and_the_others_counted(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    quiet = {"event": "GENERIC_EVENT", "event_name": "fine", "severity": "INFO"}
    report(server, *(event for number in range(5000) for event in (quiet, loud(number))))
    lines = [record.getMessage() for record in told(caplog)]
    assert lines == [
        *(f"a client reports 'odd-{number}': 'boom'" for number in range(MAX_LOGGED)),
        "a client reports 4980 more errors, which are left out",
    ]


def test_as_many_as_are_logged_leave_nothing_to_count(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    report(server, *map(loud, range(MAX_LOGGED)))
    assert len(told(caplog)) == MAX_LOGGED
    assert "left out" not in caplog.text


def test_an_error_however_long_is_a_line(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    report(server, loud(1, "x" * 1_000_000 + "\n"))
    (record,) = told(caplog)
    assert len(record.getMessage()) < 1000
    assert "\n" not in record.getMessage()
