"""What is no delta, or not what it says: refused with a reason, in bounded time and memory, and live weights stay what they are."""

import random
import re
import struct
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

from bloomery.sync.codec import layout as layout_module
from bloomery.sync.codec.applying import apply
from bloomery.sync.codec.container import HEADER, Head, check_payload, head_bytes
from bloomery.sync.codec.delta import CHOICES, Delta, encode
from bloomery.sync.codec.layout import MemoryWeights
from bloomery.sync.codec.measure import count, is_readable
from bloomery.sync.codec.merge import invert, merge
from bloomery.sync.codec.numbers import NUMBERS
from bloomery.types.errors import BloomeryError, Corrupt
from tests.sync.codec.hostile import EXTREME, Opened, _put, bomb, tampered
from tests.sync.codec.weights import copied, layout_of, random_weights, same, stepped

CHUNK = 64
LAYOUT = {"a.weight": ("BF16", (2, 50)), "a.norm": ("F32", (5,)), "b.scale": ("F8_E4M3", (60,)), "b.packed": ("U8", (3,)), "c.steps": ("I64", (9,))}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "CHUNK_ELEMENTS", CHUNK)


def pair(seed: int) -> tuple[MemoryWeights, MemoryWeights]:
    rng = np.random.default_rng(seed)
    old = random_weights(layout_of(LAYOUT), rng)
    return old, stepped(old, rng, 0.1)


def fuzz(count_of_objects: int, seed: int) -> Counter[str]:
    """Tampered objects of every codec, applied to weights that must stay what they are; how it ended how often."""
    rng = random.Random(seed)
    old, new = pair(seed)
    foreign = encode(*pair(seed + 1), "fast")
    objects = [encode(old, new, choice) for choice in CHOICES]
    live, ends, longest = copied(old), Counter[str](), 0
    for _ in range(count_of_objects):
        data = tampered(rng.choice(objects), rng.choice([foreign, *objects]), rng)
        try:
            delta = Delta.parse(data)
            apply([delta], live)
        except BloomeryError as error:
            ends[type(error).__name__] += 1
            longest = max(longest, len(error.message))
        else:
            # Another way to say the same, a frame of zstd say, or an object put back together: what it led to is what it should.
            ends["applied"] += 1
            assert same(live, new)
            live = copied(old)
        assert same(live, old)
        if rng.random() < 0.05:
            _elsewhere(data, old)
    assert longest < 1000
    return ends


def _elsewhere(data: bytes, old: MemoryWeights) -> None:
    """Whatever else takes deltas refuses what it must, and by an error of ours."""
    for of in (None, old):
        for use in (lambda delta, of: merge([delta], of), invert, lambda delta, of: is_readable(delta, of) and count(delta, of)):
            try:
                use(Delta.parse(data), of)
            except BloomeryError:
                continue


def test_a_sample_of_tampered_objects_leaves_live_weights_untouched():
    ends = fuzz(1500, seed=7)
    assert ends["Corrupt"] > 1000
    assert ends["Conflict"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_tampered_objects_leave_live_weights_untouched(seed):
    ends = fuzz(5000, seed)
    assert ends["Corrupt"] > 3000


def test_every_byte_of_an_object_counts():
    old, new = pair(1)
    data = encode(old, new)
    for at in range(len(data)):
        with pytest.raises(Corrupt):
            Delta.parse(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(Corrupt):
            Delta.parse(data[:at])


@pytest.mark.parametrize("number", EXTREME)
@pytest.mark.parametrize("field", ["length", "changed"])
def test_records_that_claim_too_much_are_refused_though_every_checksum_is_right(field, number):
    opened = Opened(encode(*pair(1), "fast"))
    row = int(np.flatnonzero(opened.records["codec"])[0])
    number &= 0xFFFFFFFF
    if opened.records[row][field] == number:
        return
    opened.records[row][field] = number
    live, _ = pair(1)
    with pytest.raises(Corrupt):
        apply([Delta.parse(opened.sealed())], live)
    assert same(live, pair(1)[0])


@pytest.mark.parametrize("codec", ["fast", "fast+zstd", "tight", "planes"])
def test_a_payload_longer_than_its_codec_writes_is_refused_before_it_is_decoded(codec):
    opened = Opened(encode(*pair(1), codec))
    (row, *_) = np.flatnonzero(opened.records["codec"] == CHOICES[codec])
    opened.payloads[row] += bytes(6 * CHUNK)
    opened.records[row]["length"] = len(opened.payloads[row])
    with pytest.raises(Corrupt, match=f"chunk {row} of a delta has (more bytes than any distances take|elements that are larger than raw ones)"):
        Delta.parse(opened.sealed())


@pytest.mark.parametrize("dtype", ["I64", "U64", "F64"])
def test_the_difference_without_an_absolute_value_is_counted(dtype):
    old = MemoryWeights.zeros(layout_of({"a": (dtype, (CHUNK,))}))
    new = copied(old)
    kind = NUMBERS[dtype]
    new["a"][7] = kind.ordered(kind.ordered(old["a"][7:8]) + np.uint64(1 << 63))[0]
    for base in (None, old):
        counts = count(Delta.parse(encode(old, new, "fast")), base)
        assert counts.tensors == {"a": 1}
        assert counts.by_exponent[dtype].sum(axis=0).nonzero()[0].tolist() == [0], "it is far"


def test_a_head_can_be_trusted_before_its_payloads_are_there():
    old, new = pair(1)
    data = encode(old, new)
    assert head_bytes(data[: HEADER.size]) == Head.parse(data).head_bytes
    head = Head.parse(data[: head_bytes(data[: HEADER.size])])
    assert head.to_bytes() == data[: head.head_bytes]
    for record in head.records:
        payload = data[record.offset : record.offset + record.length]
        check_payload(record, payload)
        before, after = (weights.read(weights.layout.chunk(record.number)) for weights in (old, new))
        indices, values, _ = head.changes(record.number, payload, before)
        assert after[indices].tolist() == values.tolist()
        if payload:
            with pytest.raises(Corrupt, match=f"the payload of chunk {record.number} does not match its checksum"):
                head.changes(record.number, payload[:-1] + bytes([payload[-1] ^ 1]), before)
    with pytest.raises(Corrupt, match="cut off within its head"):
        Head.parse(data[: head.head_bytes - 1])
    with pytest.raises(Corrupt, match="the head of a delta does not match its checksum"):
        Head.parse(data[:70] + bytes([data[70] ^ 1]) + data[71:])


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "these are 0 in all"), (b"PK" + bytes(98), "begins with other bytes"), (bytes(64), "other bytes")]
)
def test_what_is_no_delta_at_all_is_called_so(data, reason):
    with pytest.raises(Corrupt, match=reason):
        Delta.parse(data)


def test_deltas_of_a_later_version_are_not_guessed_at():
    opened = Opened(encode(*pair(1)))
    _put(opened.header, 4, 2, 2)
    with pytest.raises(Corrupt, match="this delta is of version 2"):
        Delta.parse(opened.sealed())


def test_a_base_that_builds_on_something_is_refused():
    opened = Opened(encode(*pair(1)))
    opened.header[6] = 0
    with pytest.raises(Corrupt, match="something before it, in a base"):
        Delta.parse(opened.sealed())


BOMB = """
    import resource, sys
    from pathlib import Path
    from bloomery.sync.codec.applying import apply
    from bloomery.sync.codec.delta import Delta
    from bloomery.sync.codec.layout import MemoryWeights
    from bloomery.types.errors import Corrupt
    delta = Delta.parse(Path(sys.argv[1]).read_bytes())
    live = MemoryWeights.zeros(delta.layout)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
    try:
        apply([delta], live)
    except Corrupt as error:
        print("refused:", error.message, bool(live["a"].any()))
"""


@pytest.mark.parametrize("claims", [1 << 20, 1 << 30], ids=["as it should be", "as it is"])
def test_a_stream_that_unpacks_to_a_gigabyte_is_refused_within_a_quarter_of_one(claims, tmp_path, monkeypatch):
    monkeypatch.undo()
    old = MemoryWeights.zeros(layout_of({"a": ("BF16", (1 << 20,))}))
    opened = Opened(encode(old, stepped(old, np.random.default_rng(1)), "fast+zstd"))
    frame = bomb(claims, 8 << 10)
    opened.payloads[0][:] = struct.pack("<8I", 1 << 20, 0, 0, 0, len(frame), 0, 0, 0) + frame
    opened.records[0]["length"] = len(opened.payloads[0])
    (tmp_path / "bomb").write_bytes(opened.sealed())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOMB), str(tmp_path / "bomb")], capture_output=True, text=True, timeout=120, check=False
    )
    assert re.match(r"refused: .*(frame|stream of 1048576 bytes).* False$", done.stdout), done.stdout + done.stderr
