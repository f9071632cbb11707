"""Lists of the contract: some things, and whether there are more behind the last one."""

from collections.abc import Sequence
from typing import Any


def page_of(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Whoever wants more asks `after` the last one."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
