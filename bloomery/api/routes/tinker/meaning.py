"""What a request means, as a hash: the SDK repeats a request under its number, and another one under the same number is a mistake."""

import json
from typing import Any, Final

from blake3 import blake3

from bloomery.api.routes.tinker.bodies import Body

_BYTES: Final = 16


def hash_of(route: str, body: Body) -> bytes:
    """Of a JSON body: what it says counts, and neither the order of its fields nor those that it leaves at their defaults."""
    said = json.dumps([route, body.model_dump(exclude={"weights_access_token"})], sort_keys=True)
    return blake3(said.encode(errors="surrogatepass")).digest(length=_BYTES)


def canonical(message: Any) -> bytes:
    """A protobuf message, whose maps have no order, always in the same one."""
    return bytes(message.SerializeToString(deterministic=True))


def hash_of_bytes(said: bytes) -> bytes:
    """Of a body in its canonical form."""
    return blake3(said).digest(length=_BYTES)
