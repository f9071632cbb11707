"""What all bodies of the contract have in common."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from bloomery.types.errors import InvalidInput

Made = TypeVar("Made", bound=BaseModel)


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not named is refused."""


def checked(kind: type[Made], values: Mapping[str, Any], names: Mapping[str, str]) -> Made:
    """What a body asks for, as services take it. `names` are the contract's for fields that it calls otherwise, deeper ones first."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        known = next((name for name in names if place == name or place.startswith(f"{name}.")), None)
        field = place if known is None else names[known] + place.removeprefix(known)
        raise InvalidInput(f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}", field=field) from None
