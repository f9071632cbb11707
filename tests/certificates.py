"""Whose certificates are trusted: one authority's, where nobody is talked to but loopback, as clients begin with reading all that there are.

It has signed nothing, and its key is gone; with none at all some clients refuse to be made.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_AUTHORITY: Final = Path(__file__).parent / "authority.pem"
_NAMES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_BEFORE: Final = {name: os.environ[name] for name in _NAMES if name in os.environ}


@contextmanager
def nobody_trusted() -> Iterator[None]:
    """In this process and in those that it starts: a client of httpx costs 0.5 ms of processor time, not 20."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(_AUTHORITY))
        patch.delenv("SSL_CERT_DIR", raising=False)
        yield


def trusting() -> dict[str, str]:
    """The environment of a process that goes to the network, to install something."""
    return {name: value for name, value in os.environ.items() if name not in _NAMES} | _BEFORE
