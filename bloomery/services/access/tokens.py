"""Signed statements that expire: JSON web tokens, which their holders can read and only this server can make.

The audience says what a token is for: an address to download from is never accepted where a key is asked for.
"""

import hashlib
import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bloomery.disk.durable import write_privately
from bloomery.types.errors import InvalidToken
from bloomery.types.ids import now_us

MARK: Final = "eyJ"
"""How every token begins, and no key."""
_KEY_BYTES: Final = 32


class Tokens:
    """Signs and reads, with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, audience: str, claims: Mapping[str, Any], *, expires_s: int) -> str:
        """A token that says this until `expires_s`, seconds since the epoch."""
        said = {**claims, "aud": audience, "iat": now_us() // 1_000_000, "exp": expires_s}
        signed = f"{_encode({'alg': 'HS256', 'typ': 'JWT'})}.{_encode(said)}"
        return f"{signed}.{self._signature(signed)}"

    def read(self, audience: str, token: str) -> dict[str, Any]:
        """What a token says; InvalidToken unless it was signed here, for this, and is not over."""
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(signed).encode()):
            raise InvalidToken("this server did not sign this token: exchange the key for another")
        said = _decode(signed.partition(".")[2])
        if said["aud"] != audience:
            raise InvalidToken(f"this token is for {said['aud']}, not for {audience}")
        if said["exp"] * 1_000_000 <= now_us():
            raise InvalidToken("this token is over: ask for another")
        return said

    def _signature(self, signed: str) -> str:
        return _text(hmac.digest(self._key, signed.encode(), hashlib.sha256))


def signing_key(path: Path) -> bytes:
    """The key in this file, which is made if it is not there."""
    if not path.exists():
        # Under its name only when it is whole: half a key would be easy to guess.
        write_privately(path, secrets.token_bytes(_KEY_BYTES))
    return path.read_bytes()


def _encode(content: Mapping[str, Any]) -> str:
    return _text(json.dumps(content, separators=(",", ":")).encode())


def _decode(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return found


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
