"""What the published OpenAPI document says of the bodies under `/v1`, which routes read themselves."""

from typing import Any

import msgspec


def body_of(kind: type[msgspec.Struct], *, untagged: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """The part of a route's description that says what it takes: an alternative that is `untagged` may leave out its tag."""
    schemas, parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    if untagged is not None:
        parts[untagged.__name__]["required"].remove(untagged.__struct_config__.tag_field)
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
