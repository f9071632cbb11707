"""Memory in large pages: what a kernel may take for granted of it, and that the system is asked for them."""

import gc
import mmap
import re
from pathlib import Path

import pytest

from bloomery.models.memory import large_pages

PAGE = 2 << 20
MAPPINGS = Path("/proc/self/smaps")


def mapping_of(address: int) -> str | None:
    """What the system tells of the pages there."""
    for told in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text()):
        first, behind = (int(number, 16) for number in told.split(" ", 1)[0].split("-"))
        if first <= address < behind:
            return told
    return None


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_it_holds_zeros_and_as_many_as_were_asked_for(size_bytes):
    memory = large_pages(size_bytes)
    assert memory.shape == (size_bytes,)
    assert not memory.any()
    assert size_bytes == 0 or memory.data_ptr() % PAGE == 0
    memory.fill_(7)
    assert (memory == 7).all()
    assert not large_pages(size_bytes).any()


@pytest.mark.skipif(
    not (MAPPINGS.exists() and hasattr(mmap, "MADV_HUGEPAGE")), reason="this system says nothing of its pages, or has small ones alone"
)
def test_whole_pages_are_asked_for_and_the_rest_takes_no_more_than_it_needs():
    memory = large_pages(3 * PAGE + 5)
    whole, rest = mapping_of(memory.data_ptr() + PAGE), mapping_of(memory.data_ptr() + 3 * PAGE)
    assert whole is not None
    assert rest is not None
    assert " hg" in whole
    assert " hg" not in rest


@pytest.mark.skipif(not MAPPINGS.exists(), reason="this system says nothing of its pages")
def test_it_goes_with_the_last_tensor_that_looks_at_it():
    part = large_pages(4 * PAGE).view(4, PAGE)[2]
    address = part.data_ptr()
    gc.collect()
    assert mapping_of(address) is not None
    del part
    gc.collect()
    assert mapping_of(address) is None
