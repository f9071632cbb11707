"""Who calls, and what the key allows."""

from typing import Final, NamedTuple

from bloomery.store.rows import DEFAULT_PROJECT
from bloomery.types.errors import Forbidden
from bloomery.types.keys import SCOPES, Scope

__all__ = ["SCOPES", "UNLIMITED", "Allowance", "Principal"]


class Allowance(NamedTuple):
    """What a key may use per minute of models that answer; None is as much as there is."""

    requests: int | None = None
    tokens: int | None = None
    """Of prompts and of what is sampled."""


UNLIMITED: Final = Allowance()


class Principal(NamedTuple):
    """The caller of a verb; every row it reads or writes belongs to `project`."""

    project: str
    key_id: str
    scopes: frozenset[Scope]
    allowance: Allowance = UNLIMITED
    patient: bool = False
    """What is asked so is sampled behind what people wait for."""

    def require(self, *scopes: Scope) -> None:
        """Refuse unless the key has one of the scopes."""
        if self.scopes.isdisjoint(scopes):
            raise Forbidden(f"this key lacks the scope {' or '.join(f'`{scope}`' for scope in scopes)}: use a key that has it")

    def require_server(self) -> None:
        """Refuse unless the key administers the server, which is more than its own project."""
        self.require("admin")
        if self.project != DEFAULT_PROJECT:
            raise Forbidden(f"this key administers project `{self.project}` alone: use an admin key of project `{DEFAULT_PROJECT}`")
