"""Whatever computes, the same bytes come of it, and the same is refused; in C and with numba nothing outside of what was allocated is touched."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import bloomery.sync.codec
from bloomery.models.compiled import Compiled
from bloomery.sync.codec import fast, tight
from bloomery.sync.codec.kernels import PLAIN, Kernels, available
from bloomery.sync.codec.native import ARGUMENTS, NATIVE, Native
from bloomery.sync.codec.numbers import NUMBERS, Changes, Differences
from bloomery.sync.codec.plain import Streams, split
from bloomery.sync.state_hash import StateHash, change
from bloomery.types.errors import Corrupt

from .chunks import EVERY, FULL, damaged, pairs, weights

FOLDER = Path(bloomery.sync.codec.__file__).parent
ROOT = Path(__file__).parents[3]
COMPILER = pytest.mark.skipif(shutil.which("cc") is None or os.environ.get("BLOOMERY_NATIVE") == "0", reason="numpy computes everything here")
BF16 = NUMBERS["BF16"]
FIRST, BEFORE = (1 << 47) + 5, StateHash(7, (1 << 64) - 9)


def compiled(*flags: str) -> Native:
    return Native(Compiled("codec", FOLDER, ARGUMENTS, flags=flags, instead="numpy"))


KERNELS: dict[str, Kernels] = {
    "native": NATIVE,
    # What other processors have: no comparison of 64 elements, no instruction that finds a bit, no vectors at all.
    "without_avx512": compiled("-mno-avx512f"),
    "without_vectors": compiled("-U__AVX512BW__", "-U__SSE2__", "-U__BMI2__"),
}
JITTED = available().get("numba")
OTHERS = pytest.mark.parametrize(
    "kernels",
    [
        *(pytest.param(each, id=name, marks=COMPILER) for name, each in KERNELS.items()),
        pytest.param(JITTED, id="numba", marks=pytest.mark.skipif(JITTED is None, reason="numba is not installed")),
    ],
)


def said(streams: Streams) -> list[bytes]:
    return [stream.tobytes() for stream in streams]


def same(one: Differences, other: Differences) -> None:
    assert one.indices.dtype == other.indices.dtype == np.uint32
    assert one.by.dtype == other.by.dtype
    assert one.indices.tolist() == other.indices.tolist()
    assert one.by.tolist() == other.by.tolist()


def the_same(one: Changes, other: Changes) -> None:
    assert one.indices.dtype == other.indices.dtype == np.uint32
    assert one.values.dtype == other.values.dtype
    assert one.indices.tolist() == other.indices.tolist()
    assert one.values.tolist() == other.values.tolist()
    assert one.state == other.state


def agree(kernels: Kernels, old: np.ndarray, new: np.ndarray, kind) -> None:
    found = PLAIN.find(old, new, kind)
    same(kernels.find(old, new, kind), found)
    streams = PLAIN.pack(found, kind)
    assert said(kernels.pack(found, kind)) == said(streams)
    same(kernels.unpack(streams, len(old), kind), found)
    made = PLAIN.decode(streams, old, kind, FIRST, BEFORE)
    assert made.values.tolist() == new[found.indices].tolist()
    assert made.state == BEFORE + change(found.indices, old[found.indices], new[found.indices], FIRST)
    the_same(kernels.decode(streams, old, kind, FIRST, BEFORE), made)
    whole = fast.encode_differences(*found, len(old), kind)
    the_same(kernels.decode_fast(memoryview(whole), old, kind, FIRST, BEFORE), made)
    if len(found.indices) and tight.possible(kind):
        payload = kernels.pack_tight(old, found, kind)
        assert payload == PLAIN.pack_tight(old, found, kind)
        the_same(kernels.decode_tight(memoryview(payload), old, kind, FIRST, BEFORE), made)
    written = old.copy()
    kernels.put(written, 0, made.indices, made.values)
    assert (written == new).all()


@OTHERS
@settings(max_examples=150, deadline=None)
@given(pair=pairs())
def test_they_are_what_numpy_says(kernels, pair):
    kind, old, new = pair
    agree(kernels, old, new, kind)


@OTHERS
@EVERY
def test_of_a_full_chunk_too(kernels, kind):
    agree(kernels, *weights(kind, FULL - 3, share=0.01), kind)


@OTHERS
def test_of_one_where_everything_changed(kernels):
    agree(kernels, *weights(BF16, FULL // 8 + 1, share=1.0), BF16)


@OTHERS
def test_of_changes_that_move_further_only_now_and_then(kernels):
    steps = np.ones(1300, np.uint16)
    # As far apart as a byte tells, one more, and twice as much.
    steps[[253, 508, 764, 1274]] = (2, 3, 300, 2)
    old = np.arange(1300, dtype=np.uint16)
    assert PLAIN.pack(PLAIN.find(old, old + steps, BF16), BF16).exception_gaps.tolist() == [253, 254, 255, 0, 255, 254]
    agree(kernels, old, old + steps, BF16)


@OTHERS
def test_elements_at_odd_addresses_are_read(kernels):
    old, new = weights(BF16, 999, share=0.1)
    moved = np.frombuffer(b"\0" + old.tobytes(), np.uint16, offset=1)
    agree(kernels, moved, new, BF16)


@OTHERS
@pytest.mark.parametrize("name", ["BF16", "U8", "F8_E5M2", "F32", "F16", "F64"])
def test_they_refuse_what_numpy_refuses_and_read_what_it_reads(kernels, name):
    kind, rng = NUMBERS[name], np.random.default_rng(3)
    # The second goes through several tiles of elements, and blocks of changes.
    for count, share in ((700, 0.02), (2500, 0.3)):
        old, new = weights(kind, count, share=share)
        found = PLAIN.find(old, new, kind)
        given = [(fast.encode_differences(*found, len(old), kind), _decode)]
        given += [(PLAIN.pack_tight(old, found, kind), _decode_tight)] if tight.possible(kind) else []
        for _ in range(250):
            for payload, each in given:
                other = memoryview(damaged(payload, rng))
                expected, found = (_answer(each, computing, other, old, kind) for computing in (PLAIN, kernels))
                assert (expected is None) == (found is None)
                if expected is not None:
                    the_same(found, expected)


def _decode(kernels, payload, old, kind) -> Changes:
    made = kernels.decode_fast(payload, old, kind, FIRST, BEFORE)
    streams = split(payload)
    the_same(kernels.decode(streams, old, kind, FIRST, BEFORE), made)
    assert kernels.unpack(streams, len(old), kind).indices.tolist() == made.indices.tolist()
    return made


def _decode_tight(kernels, payload, old, kind) -> Changes:
    return kernels.decode_tight(payload, old, kind, FIRST, BEFORE)


def _answer(decode, kernels, payload, old, kind) -> Changes | None:
    try:
        return decode(kernels, payload, old, kind)
    except Corrupt:
        return None


@COMPILER
def test_places_behind_the_end_are_not_read():
    beyond = Differences(np.array([5], np.uint32), np.array([1], np.uint16))
    with pytest.raises(IndexError):
        NATIVE.pack_tight(np.zeros(5, np.uint16), beyond, BF16)
    with pytest.raises(ValueError, match="5 elements become 4"):
        NATIVE.find(np.zeros(5, np.uint16), np.zeros(4, np.uint16), BF16)


@OTHERS
@pytest.mark.parametrize(("first", "indices"), [(0, [1, 5]), (3, [0, 2]), (-1, [0, 1])])
def test_where_one_element_is_not_there_none_is_written(kernels, first, indices):
    weights = np.zeros(5, np.uint16)
    with pytest.raises(IndexError):
        kernels.put(weights, first, np.array(indices, np.uint32), np.ones(2, np.uint16))
    assert not weights.any()


@OTHERS
def test_elements_are_written_wherever_they_lie(kernels):
    indices, values = np.array([7, 9], np.uint32), np.array([1, 2], np.uint16)
    weights = np.zeros(12, np.uint16)
    kernels.put(weights, -4, indices, values)
    odd = np.frombuffer(bytearray(25), np.uint16, offset=1)
    kernels.put(odd, -4, indices, values)
    apart = np.zeros(24, np.uint16)[::2]
    kernels.put(apart, -4, indices, values)
    assert weights.tolist() == odd.tolist() == apart.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0]
    weights.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.put(weights, 0, indices, values)


@COMPILER
@pytest.mark.parametrize("flags", [(), ("-mno-avx512f",), ("-U__AVX512BW__", "-U__SSE2__", "-U__BMI2__")], ids=["native", "avx2", "plain"])
def test_hostile_payloads_touch_nothing_that_is_not_theirs(flags, tmp_path):
    program, here = tmp_path / "fuzz", Path(__file__).parent
    watched = ("-g", "-O1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *flags, "-I", str(FOLDER), "-I", str(here))
    made = subprocess.run(["cc", *watched, str(here / "fuzz.c"), "-o", str(program)], capture_output=True, text=True, timeout=120)
    if "sanit" in made.stderr or "asan" in made.stderr:
        pytest.skip("this compiler cannot watch memory")
    assert made.returncode == 0, made.stderr
    times = os.environ.get("BLOOMERY_FUZZ", "20000")
    ran = subprocess.run([program, times, "1"], capture_output=True, text=True, timeout=1000, env={"ASAN_OPTIONS": "detect_leaks=0"})
    assert ran.returncode == 0, ran.stderr
    # Some are what could have been written all the same.
    assert all(int(read) > 0 for read in ran.stdout.split())


WATCHED = """
    import sys, numba, numpy, pytest
    first_of = numba.njit(boundscheck=False)(lambda elements, place: elements[place])
    try:
        sys.exit(f"nobody watches: {first_of(numpy.zeros(1), 4)}")
    except IndexError:
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "refuse and numba", "tests/sync/codec/test_kernels.py"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(JITTED is None, reason="numba is not installed")
def test_with_numba_hostile_payloads_lead_to_no_place_that_is_not_there(tmp_path):
    """Damaged ones once more, in a process in which numba holds every place against its array."""
    watched = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(WATCHED)], cwd=ROOT, env=watched, capture_output=True, text=True, timeout=1000)
    assert ran.returncode == 0, ran.stdout + ran.stderr


CHOSEN = """
    import sys
    if "{without}":
        sys.modules["{without}"] = None
    import numpy as np
    from bloomery.sync.codec import kernels
    from bloomery.sync.codec.delta import encode
    from bloomery.sync.state_hash import hash_elements
    from tests.sync.codec.weights import EVERY_DTYPE, random_weights, stepped
    from bloomery.sync.codec.layout import Layout
    chance = np.random.default_rng(1)
    old = random_weights(Layout.of(EVERY_DTYPE), chance)
    print(type(kernels.chosen()).__name__, *kernels.available(), hash_elements(np.frombuffer(encode(old, stepped(old, chance, 0.3)), np.uint8), 0))
"""


def test_the_fastest_that_there_is_computes_and_the_bytes_are_the_same() -> None:
    """In processes that have C, numba, or neither."""

    def said_by(native: bool, numba: bool) -> list[str]:
        environment = os.environ | ({} if native else {"BLOOMERY_NATIVE": "0"})
        code = textwrap.dedent(CHOSEN.format(without="" if numba else "numba"))
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.split()

    c = ["native"] if NATIVE.there else []
    jitted = ["numba"] if JITTED is not None else []
    names = {"native": "Native", "numba": "Jitted", "numpy": "Plain"}
    hashes = set()
    for native, numba in ((True, True), (True, False), (False, True), (False, False)):
        there = [*(c if native else []), *(jitted if numba else []), "numpy"]
        chosen, *available_there, hash_ = said_by(native, numba)
        assert (chosen, available_there) == (names[there[0]], there)
        hashes.add(hash_)
    assert len(hashes) == 1
