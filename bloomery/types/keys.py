"""API keys: what they look like and what they may allow; and the logins of browsers with them."""

import secrets
from typing import Final, Literal, get_args

from pydantic import Field

from bloomery.types.resources import Name, Resource

Scope = Literal["infer", "read", "train", "deploy", "admin"]
SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))
PREFIX: Final = "tml-"
"""The tinker SDK refuses keys that start otherwise."""


class CreateKey(Resource):
    """A key for people or programs; without a project it is for the caller's, and one that is not there yet is made."""

    name: Name
    scopes: list[Scope] = Field(min_length=1)
    project: Name | None = None
    ttl_s: int | None = Field(None, ge=1, le=10 * 365 * 86_400)
    """Seconds after which it is refused; without it the key lasts until it is revoked."""
    requests_per_minute: int | None = Field(None, ge=1, le=10**9)
    """That ask a model for an answer, under the OpenAI contract or by `asample`; without it there is no limit."""
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    """The same, of prompts and answers together."""


class Key(Resource):
    """A key without its secret, which is stored nowhere."""

    id: str
    project: str
    name: str
    scopes: list[Scope]
    created_us: int
    last_used_us: int | None
    expires_us: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None


class NewKey(Key):
    """A key just made: `key` is shown this once."""

    key: str


class LogIn(Resource):
    """The key that a browser is to be let in with."""

    key: str = Field(min_length=1, max_length=512)


class Login(Resource):
    """Who is logged in: the name of the key, its project and scopes."""

    key: str
    project: str
    scopes: list[Scope]
    ends_us: int


class NewLogin(Login):
    """A login just made."""

    csrf: str
    """What every request repeats as `x-csrf-token`; told this once, and not kept."""


def new_key() -> str:
    """A fresh key of 256 random bits: nothing can be learned from a fast hash of it."""
    return PREFIX + secrets.token_urlsafe(32)
