"""What `fireworks-delta-compression` writes is read here and the other way round: by golden files always, with the package itself slowly."""

import pickle
from pathlib import Path
from typing import Final

import pytest

from bloomery.sync.foreign import archive, delta
from bloomery.sync.foreign.delta import FORMATS, ForeignDelta, Format
from tests.sync.codec.weights import same
from tests.sync.foreign import golden
from tests.sync.foreign.payloads import checksum_of, coded, delta_of, envelope
from tests.sync.foreign.setup import run
from tests.sync.foreign.weights import every_kind, from_file, one, to_file

FORMAT: Final = pytest.mark.parametrize("form", FORMATS)


@FORMAT
def test_golden_deltas_of_the_package_give_the_weights_that_it_had(form: Format) -> None:
    old, new = golden.weights()
    found = ForeignDelta.parse(golden.file(form).read_bytes())
    assert found.format == form
    delta.apply(found, old)
    assert same(old, new)


def test_golden_deltas_of_arc_v3_have_every_form_that_the_package_writes() -> None:
    data = golden.file("arc_v3").read_bytes()
    said = {each.name: each.encoding for each in ForeignDelta.parse(data).describe()}
    assert {encoding.split()[0] for encoding in said.values()} == {"flat", "row", "none", "xor"}
    codecs = {codec for payload in archive.read(memoryview(data)).payloads.values() for codec in (b"bz2", b"zstd") if codec in payload[:60].tobytes()}
    assert codecs == {b"bz2", b"zstd"}


@pytest.mark.slow
@FORMAT
def test_the_package_reads_what_is_written(form: Format, tmp_path: Path) -> None:
    old, new = every_kind()
    written = tmp_path / "delta.safetensors"
    written.write_bytes(delta.encode(old, new, form))
    run("apply", form, to_file(old, tmp_path / "old"), written, tmp_path / "new")
    assert same(from_file(tmp_path / "new"), new)


@pytest.mark.slow
@FORMAT
def test_what_the_package_writes_is_read(form: Format, tmp_path: Path) -> None:
    old, new = every_kind()
    run("encode", form, to_file(old, tmp_path / "old"), to_file(new, tmp_path / "new"), tmp_path / "delta")
    found = ForeignDelta.parse((tmp_path / "delta").read_bytes())
    assert found.format == form
    delta.apply(found, old)
    assert same(old, new)


@pytest.mark.slow
def test_the_package_reads_codebooks_as_they_are_read_here(tmp_path: Path) -> None:
    """It writes none: what it holds against the size of plain values can never be smaller."""
    old, new = one()
    written = tmp_path / "delta.safetensors"
    written.write_bytes(delta_of(envelope(pickle.dumps(coded(one()))), checksum_of(new)))
    run("apply", "arc_v3", to_file(old, tmp_path / "old"), written, tmp_path / "new")
    assert same(from_file(tmp_path / "new"), new)
    delta.apply(ForeignDelta.parse(written.read_bytes()), old)
    assert same(old, new)


@pytest.mark.slow
def test_deltas_are_no_larger_than_those_of_the_package(tmp_path: Path) -> None:
    old, new = one((400, 2000), 0.01)
    run("encode", "arc_v3", to_file(old, tmp_path / "old"), to_file(new, tmp_path / "new"), tmp_path / "delta")
    assert len(delta.encode(old, new, "arc_v3")) <= 1.01 * (tmp_path / "delta").stat().st_size
