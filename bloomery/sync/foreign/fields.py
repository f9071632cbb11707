"""What a pickle of plain data holds, asked for by name and type: nothing may be missing, nothing may be left."""

from typing import TypeVar

from bloomery.sync.foreign.pickles import Value
from bloomery.types.errors import Corrupt, shown

Kind = TypeVar("Kind")


class Fields:
    """A dict, of which every field is taken once; `what` names it where one is not as it should be."""

    def __init__(self, found: Value, what: str) -> None:
        if not isinstance(found, dict):
            raise Corrupt(f"{what} has no fields")
        self._left, self._what = dict(found), what

    def number(self, name: str, *, at_most: int) -> int:
        found = self._take(name, int)
        if found > at_most:
            raise Corrupt(f"`{name}` of {self._what} is {found}, and can be no more than {at_most}")
        return found

    def text(self, name: str) -> str:
        return self._take(name, str)

    def one_of(self, name: str, *known: str) -> str:
        found = self.text(name)
        if found not in known:
            raise Corrupt(f"`{name}` of {self._what} is `{shown(found)}`, and can be {', '.join(known)}")
        return found

    def exactly(self, name: str, expected: str | int | tuple[int, ...]) -> None:
        found = self._take(name, type(expected))
        if found != expected:
            raise Corrupt(f"`{name}` of {self._what} is {shown(repr(found))}, and {expected!r} is expected")

    def numbers(self, name: str) -> tuple[int, ...]:
        found = self._take(name, tuple)
        if not all(isinstance(each, int) for each in found):
            raise Corrupt(f"`{name}` of {self._what} are no numbers")
        return found

    def data(self, name: str) -> memoryview:
        return self._take(name, memoryview)

    def fields(self, name: str) -> "Fields":
        return Fields(self._take(name, dict), f"`{name}` of {self._what}")

    def done(self) -> None:
        """All that there may be has been taken."""
        if self._left:
            raise Corrupt(f"{self._what} has a field `{shown(min(self._left))}` that is not known")

    def _take(self, name: str, kind: type[Kind]) -> Kind:
        found = self._left.pop(name, None)
        if not isinstance(found, kind):
            raise Corrupt(f"{self._what} has no `{name}` of type {kind.__name__}")
        return found
