"""What the api says about itself and the engines, asked with a short deadline."""

import json
from http.client import HTTPConnection, HTTPException
from typing import Final, NamedTuple

_TIMEOUT_S: Final = 2.0
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Health(NamedTuple):
    """`answers`: the api is there; `waiting_for`: aliases whose engine is not."""

    answers: bool
    waiting_for: frozenset[str]


def ask(host: str, port: int) -> Health:
    """GET /healthz."""
    connection = HTTPConnection(_EVERYWHERE.get(host, host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = json.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return Health(answers=False, waiting_for=frozenset())
    finally:
        connection.close()
    return Health(answers=True, waiting_for=frozenset(answer.get("waiting_for", ())))
