"""What the published OpenAPI document says of the bodies under `/v1`, which routes read themselves."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

Refused = Mapping[str, tuple[Any, ...]]
"""Fields that are known and not offered, each with the values beside null that ask for nothing."""
RefusedIn = Mapping[type[msgspec.Struct], Refused]
_NOWHERE: Final[RefusedIn] = MappingProxyType({})


def body_of(kind: type[msgspec.Struct], *, untagged: type[msgspec.Struct] | None = None, refused: RefusedIn = _NOWHERE) -> dict[str, Any]:
    """The part of a route's description that says what it takes: an alternative that is `untagged` may leave out its tag, and of what is `refused`
    in a form the values that ask for nothing may be sent.
    """
    schemas, parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    if untagged is not None:
        parts[untagged.__name__]["required"].remove(untagged.__struct_config__.tag_field)
    for form, fields in refused.items():
        parts[form.__name__]["properties"] |= {name: {"enum": [None, *nothing]} for name, nothing in fields.items()}
    schema = _inlined(schemas[0], parts)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema without references: they would have to live where FastAPI puts its own."""
    if isinstance(schema, list):
        return [_inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    # A discriminator maps tags to references, and each alternative already says its tag.
    return {name: _inlined(each, parts) for name, each in schema.items() if not (name == "discriminator" and "anyOf" in schema)}
