"""What the texts behind the fields of a class say of them, for the published documents.

Read from the source when somebody asks for a schema, and not when the class is made: who imports it should not wait for that.
"""

import ast
import inspect
import sys
from functools import cache
from typing import Any


def describe_fields(schema: dict[str, Any], model: type) -> None:
    """Write into the JSON schema of a model what its source says behind each field, as pydantic's `json_schema_extra`."""
    said = {name: text for each in reversed(model.__mro__) for name, text in _said_in(each.__module__).get(each.__qualname__, {}).items()}
    for name, field in schema.get("properties", {}).items():
        if name in said:
            field.setdefault("description", said[name])


@cache
def _said_in(module: str) -> dict[str, dict[str, str]]:
    """The texts behind the fields of each class of a module, by their names; nothing where there is no source."""
    try:
        written = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {definition.name: _said_of(definition) for definition in written.body if isinstance(definition, ast.ClassDef)}


def _said_of(definition: ast.ClassDef) -> dict[str, str]:
    said = {}
    for field, behind in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(behind, ast.Expr):
            text = behind.value.value if isinstance(behind.value, ast.Constant) else None
            if isinstance(text, str):
                said[field.target.id] = inspect.cleandoc(text)
    return said
