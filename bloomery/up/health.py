"""What the api says about itself, the engines and the replicas, asked with a short deadline."""

import json
from http.client import HTTPConnection, HTTPException
from typing import Final, NamedTuple

_TIMEOUT_S: Final = 2.0
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Health(NamedTuple):
    """`answers`: the api is there; `waiting_for`: aliases whose engine is not.

    `wanted`: bases whose replicas are to run; `replicas`: names of those that answer; `silent`: of those that are there, and have long said nothing.
    """

    answers: bool
    waiting_for: frozenset[str]
    wanted: frozenset[str] = frozenset()
    replicas: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    runners: frozenset[str] = frozenset()
    """Runners of jobs that have asked for work lately."""


def reachable(host: str) -> str:
    """Where a program on this machine finds who listens on `host`."""
    return _EVERYWHERE.get(host, host)


def ask(host: str, port: int) -> Health:
    """GET /healthz."""
    connection = HTTPConnection(reachable(host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = json.loads(connection.getresponse().read())
        wanted, ready, silent = (frozenset(answer["replicas"][which]) for which in ("wanted", "ready", "silent"))
        return Health(True, frozenset(answer.get("waiting_for", ())), wanted, ready, silent, frozenset(answer["runners"]))
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
        # Nobody there, or somebody who says something else: an error, or another program on the port.
        return Health(answers=False, waiting_for=frozenset())
    finally:
        connection.close()
