"""Room in large pages: what a kernel may take for granted of it, that the system is asked for them, and that it gets them back."""

import gc
import re
from pathlib import Path

import pytest
import torch

from bloomery.models import memory
from bloomery.models.memory import LargePages, large_pages

PAGE = 2 << 20
MAPPINGS = Path("/proc/self/smaps")
LARGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
tells = pytest.mark.skipif(not (MAPPINGS.exists() and LARGE.exists()), reason="this system has no large pages, or says nothing of them")


def mapping_of(address: int) -> str | None:
    """What the system tells of the pages there."""
    for told in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text()):
        first, behind = (int(number, 16) for number in told.split(" ", 1)[0].split("-"))
        if first <= address < behind:
            return told
    return None


def is_large(address: int) -> bool:
    told = mapping_of(address)
    assert told is not None
    return " hg" in told


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_it_holds_zeros_and_as_many_as_were_asked_for(size_bytes):
    room = large_pages(size_bytes)
    assert room.shape == (size_bytes,)
    assert not room.any()
    assert size_bytes == 0 or room.data_ptr() % PAGE == 0
    room.fill_(7)
    assert (room == 7).all()
    assert not large_pages(size_bytes).any()


@tells
def test_all_of_it_is_in_pages_that_were_asked_to_be_large():
    room = large_pages(3 * PAGE + 5)
    assert all(is_large(room.data_ptr() + place) for place in (0, PAGE, 3 * PAGE + 4))


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 70])
def test_more_than_there_is_is_no_memory(size_bytes):
    with pytest.raises(MemoryError, match=str(size_bytes)):
        large_pages(size_bytes)


@tells
def test_what_comes_together_lies_together_and_goes_with_the_last_of_it():
    pages = LargePages()
    small = [pages.take(size) for size in (100, 1, 0, 5000)]
    addresses = [room.data_ptr() for room in small if len(room)]
    assert addresses == [addresses[0], addresses[0] + 128, addresses[0] + 192]
    assert all(map(is_large, addresses))
    large = pages.take(memory._STRETCH)
    assert not large.any()
    assert mapping_of(large.data_ptr() + memory._STRETCH - 1) is not None
    for number, room in enumerate(small):
        room.fill_(number)
    assert [room.unique().tolist() for room in small] == [[0], [1], [], [3]]
    del pages
    kept = small.pop(1)
    small.clear()
    del room
    gc.collect()
    assert mapping_of(addresses[0]) is not None
    del kept
    gc.collect()
    assert mapping_of(addresses[0]) is None


@tells
def test_many_small_things_take_few_mappings():
    before = len(re.findall(r"VmFlags", MAPPINGS.read_text()))
    pages = LargePages()
    held = [pages.take(50_000).view(torch.float32) for _ in range(3000)]
    assert len({room.data_ptr() for room in held}) == 3000
    assert len(re.findall(r"VmFlags", MAPPINGS.read_text())) - before < 100
