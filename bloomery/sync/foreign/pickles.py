"""Plain data as a pickle: read by an interpreter of the opcodes that such data needs, which can neither import nor call anything.

Numbers from 0 on, texts, bytes, tuples and dicts are all there is. `pickle` itself would run what a hostile file asks it to.
"""

import pickletools
from collections.abc import Callable
from typing import Final

from bloomery.types.errors import Corrupt

Value = int | str | bytes | memoryview | tuple["Value", ...] | dict[str, "Value"]
"""What is read has a memoryview of the pickle where it had bytes."""

_MAX_OPCODES: Final = 1024
"""Several times what a payload takes: its size lies in a handful of long bytes."""
_PROTOCOLS: Final = (4, 5)
_WRITTEN_PROTOCOL: Final = 4
_LONG_BYTES: Final = 8
_ONE_BYTE: Final = 1 << 8
_FOUR_BYTES: Final = 1 << 32

_MARK, _STOP = b"(", b"."


def read(data: bytes | memoryview) -> Value:
    """The one value of a pickle; Corrupt for a pickle of anything but plain data."""
    return _Reader(memoryview(data)).run()


def write(value: Value) -> bytes:
    """A pickle of plain data, which any Python reads; equal values give equal bytes."""
    parts: list[bytes | memoryview] = [b"\x80", bytes([_WRITTEN_PROTOCOL])]
    _write(value, parts)
    return b"".join([*parts, _STOP])


class _Reader:
    """One pickle, its stack and its memo."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: list[Value] = []

    def run(self) -> Value:
        if bytes(self._take(1)) != b"\x80" or self._number(1) not in _PROTOCOLS:
            raise Corrupt("a pickle of protocol 4 or 5 is expected")
        for _ in range(_MAX_OPCODES):
            code = bytes(self._take(1))
            if code == _STOP:
                return self._result()
            if (step := _STEPS.get(code)) is None:
                raise Corrupt(f"the pickle has the opcode {_opcode(code)}, and plain data needs none such: nothing of it is executed")
            step(self)
        raise Corrupt(f"a pickle has at most {_MAX_OPCODES} opcodes")

    def _result(self) -> Value:
        if self._place != len(self._data) or self._marks or len(self._stack) != 1:
            raise Corrupt("a pickle is one value and ends behind it")
        return self._stack[0]

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._place:
            raise Corrupt(f"the pickle is cut off: {count} bytes are due at {self._place}, and it has {len(self._data)}")
        self._place += count
        return self._data[self._place - count : self._place]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _pop(self, count: int) -> list[Value]:
        """The last values, of which none lies below a mark."""
        if count > len(self._stack) - (self._marks[-1] if self._marks else 0):
            raise Corrupt("the pickle takes more values than it has")
        found = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return found

    def _pop_mark(self) -> list[Value]:
        if not self._marks:
            raise Corrupt("the pickle closes what it has not opened")
        found = self._pop(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return found

    def frame(self) -> None:
        if (size := self._number(8)) > len(self._data) - self._place:
            raise Corrupt(f"the pickle is cut off: a frame of {size} bytes is due, and {len(self._data) - self._place} are left")

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def number(self, width: int) -> None:
        self._stack.append(self._number(width))

    def signed(self) -> None:
        self._whole(self._take(4))

    def long(self) -> None:
        if (width := self._number(1)) > _LONG_BYTES:
            raise Corrupt(f"a number of {width} bytes is none that a payload has")
        self._whole(self._take(width))

    def _whole(self, data: memoryview) -> None:
        if (found := int.from_bytes(data, "little", signed=True)) < 0:
            raise Corrupt(f"a payload has no number below 0, and here is {found}")
        self._stack.append(found)

    def text(self) -> None:
        data = self._take(self._number(1))
        try:
            self._stack.append(str(data, "utf-8"))
        except UnicodeDecodeError as error:
            raise Corrupt(f"a text of the pickle is none: {error}") from error

    def data(self, width: int) -> None:
        self._stack.append(self._take(self._number(width)))

    def empty_dict(self) -> None:
        self._stack.append({})

    def set_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1] if len(self._stack) > (self._marks[-1] if self._marks else 0) else None
        if not isinstance(target, dict) or len(items) % 2:
            raise Corrupt("the pickle gives keys and values to what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or key in target:
                raise Corrupt("the keys of a payload are texts, each there once")
            target[key] = value

    def tuple(self, count: int | None) -> None:
        self._stack.append(tuple(self._pop_mark() if count is None else self._pop(count)))

    def memoize(self) -> None:
        self._memo.append(*self._peek())

    def _peek(self) -> list[Value]:
        found = self._pop(1)
        self._stack += found
        return found

    def get(self, width: int) -> None:
        number = self._number(width)
        if number >= len(self._memo) or not _is_simple(self._memo[number]):
            raise Corrupt(f"the pickle repeats value {number}, which is no text, bytes or row of numbers before it")
        self._stack.append(self._memo[number])


_STEPS: Final[dict[bytes, Callable[[_Reader], None]]] = {
    b"\x95": _Reader.frame,
    _MARK: _Reader.mark,
    b"K": lambda reader: reader.number(1),
    b"M": lambda reader: reader.number(2),
    b"J": _Reader.signed,
    b"\x8a": _Reader.long,
    b"\x8c": _Reader.text,
    b"C": lambda reader: reader.data(1),
    b"B": lambda reader: reader.data(4),
    b"\x8e": lambda reader: reader.data(8),
    b"}": _Reader.empty_dict,
    b"u": _Reader.set_items,
    b")": lambda reader: reader.tuple(0),
    b"\x85": lambda reader: reader.tuple(1),
    b"\x86": lambda reader: reader.tuple(2),
    b"\x87": lambda reader: reader.tuple(3),
    b"t": lambda reader: reader.tuple(None),
    b"\x94": _Reader.memoize,
    b"h": lambda reader: reader.get(1),
    b"j": lambda reader: reader.get(4),
}


def _is_simple(value: Value) -> bool:
    """Whatever holds more is there once: a dict could hold itself, and tuples of tuples grow to any size."""
    return all(isinstance(each, int) for each in value) if isinstance(value, tuple) else not isinstance(value, dict)


def _opcode(code: bytes) -> str:
    known = [each.name for each in pickletools.opcodes if each.code == code.decode("latin-1")]
    return f"{code[0]:#04x} ({known[0]})" if known else f"{code[0]:#04x}"


def _write(value: Value, parts: list[bytes | memoryview]) -> None:
    match value:
        case int():
            signed = value.to_bytes(_LONG_BYTES, "little", signed=True)
            parts += [b"K", signed[:1]] if 0 <= value < _ONE_BYTE else [b"\x8a", bytes([_LONG_BYTES]), signed]
        case str():
            data = value.encode()
            parts += [b"\x8c", len(data).to_bytes(1, "little"), data]
        case bytes() | memoryview():
            parts += [b"B", len(value).to_bytes(4, "little")] if len(value) < _FOUR_BYTES else [b"\x8e", len(value).to_bytes(8, "little")]
            parts.append(value)
        case tuple():
            parts.append(_MARK)
            for each in value:
                _write(each, parts)
            parts.append(b"t")
        case dict():
            parts += [b"}", _MARK]
            for key, each in value.items():
                _write(key, parts)
                _write(each, parts)
            parts.append(b"u")
