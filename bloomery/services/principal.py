"""Who calls, and what the key allows."""

from typing import Final, NamedTuple

from bloomery.types.errors import Forbidden

SCOPES: Final = frozenset({"infer", "read", "train", "deploy", "admin"})


class Principal(NamedTuple):
    """The caller of a verb; every row it reads or writes belongs to `project`."""

    project: str
    key_id: str
    scopes: frozenset[str]

    def require(self, scope: str) -> None:
        """Refuse unless the key has the scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this key lacks the scope `{scope}`: use a key that has it")
