"""What a request means, as a hash: the SDK repeats a request under its number, and another one under the same number is a mistake.

Nothing counts that may differ between two attempts at one thing: the order of fields, defaults, which a release may add, access tokens, which are
renewed, and the number of the sampler that weights are saved for, which the SDK draws anew at every attempt.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from blake3 import blake3
from pydantic import ValidationError

from bloomery.api.routes.tinker.bodies import Body, Numbered, Sample, Whole, whole

_BYTES: Final = 16
_RENEWED: Final = "sampling_session_seq_id"


def hash_of(route: str, body: Body) -> bytes:
    """Of a JSON body."""
    meant = body.model_dump(exclude={"weights_access_token"}, exclude_defaults=True)
    if meant.get(_RENEWED) is not None:
        meant[_RENEWED] = True
    return blake3(json.dumps([route, meant], sort_keys=True).encode()).digest(length=_BYTES)


def hash_of_operation(route: str, body: Numbered, kind: type[Whole]) -> bytes:
    """Of a training operation: as the class that it is to be read as, or as it came where it is none."""
    try:
        return hash_of(route, whole(body, kind))
    except ValidationError:
        return hash_of(route, body)


def hash_of_sample(body: Sample, tokens: bytes, beside: Sequence[Any]) -> bytes:
    """Of a sample: the tokens of its prompt, which may be many, as they are in memory, and what is asked `beside` its body."""
    meant = body.model_dump(exclude={"prompt"}, exclude_defaults=True)
    told = blake3(json.dumps(["asample", meant, beside], sort_keys=True).encode())
    return told.update(tokens).digest(length=_BYTES)


def canonical(message: Any) -> bytes:
    """A protobuf message, whose maps have no order, always in the same one."""
    return bytes(message.SerializeToString(deterministic=True))


def hash_of_bytes(said: bytes) -> bytes:
    """Of a body in its canonical form."""
    return blake3(said).digest(length=_BYTES)
