"""A store in this process, for what is put and read many thousands of times: all that a reader asks of one."""

from blake3 import blake3

from bloomery.types.errors import Corrupt, NotFound
from bloomery.types.objects import Stored


class Memory:
    """Objects in a dictionary. Times are all the same."""

    name = "memory"

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._objects[key] = bytes(data)

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        data = self._found(key)
        if len(data) > at_most:
            raise Corrupt(f"memory: `{key}` has {len(data)} bytes, and nothing of the kind has more than {at_most}")
        return data, _tag(data)

    def part(self, key: str, start: int, stop: int) -> bytes:
        data = self._found(key)
        if len(data) < stop:
            raise Corrupt(f"memory: `{key}` ends before byte {stop}")
        return data[start:stop]

    def head(self, key: str) -> Stored | None:
        return self._stored(key) if key in self._objects else None

    def list(self, folder: str, *, after: str = "") -> list[Stored]:
        return [self._stored(key) for key in sorted(self._objects) if key.startswith(f"{folder}/") and key > after]

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def _found(self, key: str) -> bytes:
        if key not in self._objects:
            raise NotFound(f"memory: there is no object `{key}`")
        return self._objects[key]

    def _stored(self, key: str) -> Stored:
        return Stored(key, len(self._objects[key]), _tag(self._objects[key]), 0)


def _tag(data: bytes) -> str:
    return blake3(data).hexdigest()
