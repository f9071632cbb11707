"""What a numbered operation means, as a hash: the same number again is a repetition, and with another body a mistake.

Nothing counts that may differ between two attempts at one thing: the order of fields, and defaults, which a release may add.
"""

from functools import cache
from typing import Any, Final

import msgspec
from blake3 import blake3
from pydantic import BaseModel

_BYTES: Final = 16
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


def hash_of(asked: msgspec.Struct) -> bytes:
    """Of an operation."""
    return _hash(_meant(asked))


def hash_of_named(verb: str, asked: BaseModel) -> bytes:
    """Of what is asked for by a name, by the verb of its route."""
    return _hash([verb, asked.model_dump(exclude_defaults=True)])


def _hash(meant: Any) -> bytes:
    return blake3(_encoder.encode(meant)).digest(length=_BYTES)


def _meant(value: Any) -> Any:
    """Structures as their tag and the fields that say something else than by default."""
    if isinstance(value, msgspec.Struct):
        said = {name: _meant(each) for name, default in _defaults(type(value)) if (each := getattr(value, name)) != default}
        return [value.__struct_config__.tag, said]
    if isinstance(value, dict):
        return {name: _meant(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_meant(each) for each in value]
    return value


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(kind)]
