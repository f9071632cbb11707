"""API keys: what they look like and what they may allow."""

import secrets
from typing import Final, Literal, get_args

Scope = Literal["infer", "read", "train", "deploy", "admin"]
SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))
PREFIX: Final = "tml-"
"""The tinker SDK refuses keys that start otherwise."""


def new_key() -> str:
    """A fresh key of 256 random bits: nothing can be learned from a fast hash of it."""
    return PREFIX + secrets.token_urlsafe(32)
