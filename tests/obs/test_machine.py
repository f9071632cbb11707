"""What a machine says of its processors."""

from pathlib import Path

import pytest

from bloomery.obs.machine import processor_flags, slow_in_bfloat16


@pytest.mark.parametrize(
    ("told", "slow"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx avx2 vaes\nflags\t\t: fpu avx avx2 vaes\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("Features\t: fp asimd\n", True),
        ("a kernel that tells nothing\n", False),
        ("", False),
    ],
)
def test_a_processor_without_instructions_for_bfloat16_is_known_by_its_flags(told: str, slow: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(told)
    assert slow_in_bfloat16(processor_flags(cpuinfo)) is slow


def test_where_nothing_is_told_nothing_is_said(tmp_path: Path) -> None:
    assert processor_flags(tmp_path / "missing") == frozenset()
