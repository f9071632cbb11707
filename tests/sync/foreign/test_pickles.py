"""The reader of plain data in pickles: all that is plain data, nothing that is code, in memory that the pickle itself takes."""

import os
import pickle
import pickletools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.sync.foreign import pickles
from bloomery.types.errors import Corrupt

numbers = st.integers(0, (1 << 63) - 1)
texts = st.text(max_size=30)
values = st.recursive(
    numbers | texts | st.binary(max_size=300) | st.lists(numbers, max_size=6).map(tuple),
    lambda inner: st.dictionaries(texts, inner, max_size=6).filter(lambda found: len(found) != 1),
    max_leaves=20,
)
plain = st.dictionaries(texts, values, min_size=2, max_size=6)


def as_bytes(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return {key: as_bytes(each) for key, each in value.items()} if isinstance(value, dict) else value


@given(plain, st.sampled_from((4, 5)))
def test_what_pickle_writes_is_read(value: dict[str, Any], protocol: int) -> None:
    assert as_bytes(pickles.read(pickle.dumps(value, protocol))) == value


@given(plain)
def test_pickle_reads_what_is_written(value: dict[str, Any]) -> None:
    written = pickles.write(value)
    assert pickle.loads(written) == value
    assert as_bytes(pickles.read(written)) == value


def test_large_bytes_are_views_of_the_pickle() -> None:
    data = pickle.dumps({"codec": "zstd", "data": bytes(1 << 20)})
    found = pickles.read(data)
    assert isinstance(found, dict)
    assert isinstance(found["data"], memoryview)
    assert found["data"].obj is data


class Runs:
    """Asks whoever unpickles it to write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_something_runs_nothing(protocol: int, tmp_path: Any) -> None:
    mark = tmp_path / "ran"
    hostile = pickle.dumps({"codec": Runs(str(mark)), "data": b""}, protocol)
    with pytest.raises(Corrupt):
        pickles.read(hostile)
    assert not mark.exists()
    pickle.loads(hostile)
    assert mark.exists(), "the pickle was harmless, so this test showed nothing"


ALLOWED = {
    "PROTO", "FRAME", "MARK", "STOP", "BININT1", "BININT2", "BININT", "LONG1", "SHORT_BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "EMPTY_DICT", "SETITEMS", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "MEMOIZE", "BINGET", "LONG_BINGET",
}  # fmt: skip


@pytest.mark.parametrize("opcode", [opcode for opcode in pickletools.opcodes if opcode.name not in ALLOWED], ids=lambda opcode: opcode.name)
def test_every_opcode_that_plain_data_does_not_need_is_refused_by_name(opcode: Any) -> None:
    with pytest.raises(Corrupt, match=rf"\({opcode.name}\)"):
        pickles.read(b"\x80\x04" + b"}" * 4 + opcode.code.encode("latin-1") + b"posix\nsystem\n" + bytes(20))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off"),
    "no protocol": (b"}.", "protocol"),
    "protocol 2": (b"\x80\x02}.", "protocol"),
    "claims 2^60 bytes": (b"\x80\x05\x8e" + (1 << 60).to_bytes(8, "little") + b"x.", "cut off"),
    "claims a frame of 2^60 bytes": (b"\x80\x05\x95" + (1 << 60).to_bytes(8, "little") + b"}.", "cut off"),
    "claims a number of 255 bytes": (b"\x80\x05\x8a\xff" + bytes(255) + b".", "number"),
    "a number below 0": (b"\x80\x05J\xff\xff\xff\xff.", "below 0"),
    "no end": (b"\x80\x05}", "cut off"),
    "two values": (b"\x80\x05}}.", "one value"),
    "no value": (b"\x80\x05.", "one value"),
    "an open mark": (b"\x80\x05(}.", "one value"),
    "bytes behind its end": (b"\x80\x05}.}", "one value"),
    "takes from an empty stack": (b"\x80\x05\x87.", "more values"),
    "takes from below a mark": (b"\x80\x05K\x01K\x02(\x86.", "more values"),
    "closes what is not open": (b"\x80\x05t.", "not opened"),
    "keys of numbers": (b"\x80\x05}(K\x01K\x02u.", "keys"),
    "a key twice": (b"\x80\x05}(\x8c\x01aK\x02\x8c\x01aK\x02u.", "keys"),
    "a key without a value": (b"\x80\x05}(\x8c\x01au.", "no dict"),
    "items of a number": (b"\x80\x05K\x01(\x8c\x01aK\x02u.", "no dict"),
    "a dict in itself": (b"\x80\x05}\x94(\x8c\x01ah\x00u.", "repeats"),
    "a tuple of tuples, doubled": (b"\x80\x05K\x01K\x02\x86\x94h\x00\x86\x94h\x01h\x01\x86.", "repeats value 1"),
    "repeats what was never there": (b"\x80\x05j\xff\xff\xff\xff.", "repeats"),
    "no text": (b"\x80\x05\x8c\x02\xff\xfe.", "text"),
    "a thousand opcodes and more": (b"\x80\x05" + b"K\x01" * 5000 + b".", "opcodes"),
    "marks without end": (b"\x80\x05" + b"(" * 5000, "opcodes"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_pickle_of_plain_data_is_refused_with_the_reason(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(Corrupt, match=reason):
        pickles.read(data)


@given(plain, st.data())
def test_a_pickle_cut_off_anywhere_is_refused(value: dict[str, Any], draw: st.DataObject) -> None:
    data = pickle.dumps(value, 5)
    with pytest.raises(Corrupt):
        pickles.read(data[: draw.draw(st.integers(0, len(data) - 1))])


@given(plain, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_plain_data_or_corrupt_and_nothing_else(value: dict[str, Any], changes: list[tuple[int, int]]) -> None:
    data = bytearray(pickle.dumps(value, 5))
    for place, byte in changes:
        data[place % len(data)] = byte
    check_plain(lambda: pickles.read(bytes(data)))


@given(st.binary(max_size=200))
def test_any_bytes_give_plain_data_or_corrupt_and_nothing_else(data: bytes) -> None:
    check_plain(lambda: pickles.read(b"\x80\x05" + data))


def check_plain(read: Callable[[], pickles.Value]) -> None:
    def check(value: pickles.Value) -> None:
        assert type(value) in (int, str, memoryview, tuple, dict)
        for each in value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else ():
            check(each)

    with suppress(Corrupt):
        check(read())
