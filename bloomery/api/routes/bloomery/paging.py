"""Which part of a list is wanted."""

from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=500)]
Offset = Annotated[int, Query(ge=0, lt=1 << 63)]
