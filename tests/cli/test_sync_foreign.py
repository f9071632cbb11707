"""`bloomery sync` with deltas of fireworks-delta-compression: written by file, known by their content, applied whole or not at all."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from bloomery.sync.foreign.delta import FORMATS, Format
from tests.cli.test_sync import done, equal, loaded, refused, save_sharded, tensors
from tests.sync.foreign.setup import run as run_peer

FORMAT = pytest.mark.parametrize("form", FORMATS)


@FORMAT
def test_a_directory_becomes_the_new_one_by_a_directory_of_deltas(form: Format, tmp_path: Path) -> None:
    old, new = (save_sharded(tmp_path / name, tensors(seed), 3) for name, seed in (("old", 0), ("new", 1)))
    assert f"of {form}" in done("diff", "--format", form, old, new, tmp_path / "delta")
    assert sorted(path.name for path in (tmp_path / "delta").iterdir()) == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert "root" in done("apply", old, tmp_path / "delta", tmp_path / "out")
    assert equal(loaded(tmp_path / "out"), loaded(new))
    assert (tmp_path / "out" / "config.json").exists()


@FORMAT
def test_a_file_becomes_the_new_one_by_deltas_one_behind_the_other(form: Format, tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.safetensors" for seed in range(3)]
    for seed, file in enumerate(files):
        save_file(tensors(seed), file)
    deltas = [tmp_path / "first", tmp_path / "second"]
    for step, file in enumerate(deltas):
        done("diff", "--format", form, files[step], files[step + 1], file)
    done("apply", files[0], *deltas, tmp_path / "out.safetensors")
    assert equal(loaded(tmp_path / "out.safetensors"), tensors(2))
    assert "damaged, or of other weights" in refused("apply", files[0], deltas[1], tmp_path / "wrong.safetensors")
    assert not (tmp_path / "wrong.safetensors").exists()


def test_roots_are_those_that_our_own_deltas_lead_to(tmp_path: Path) -> None:
    save_file(tensors(0), tmp_path / "old")
    save_file(tensors(1), tmp_path / "new")
    done("diff", tmp_path / "old", tmp_path / "new", tmp_path / "own")
    done("diff", "--format", "arc_v3", tmp_path / "old", tmp_path / "new", tmp_path / "other")
    own, other = (done("apply", tmp_path / "old", tmp_path / name, tmp_path / f"{name}.out") for name in ("own", "other"))
    assert own.split("root ")[1].split(";")[0] == other.split("root ")[1].split(";")[0]
    assert "are not applied in one go" in refused("apply", tmp_path / "old", tmp_path / "own", tmp_path / "other", tmp_path / "both")


@FORMAT
def test_inspect_counts_what_it_can_without_the_weights_and_all_with_them(form: Format, tmp_path: Path) -> None:
    old, new = (save_sharded(tmp_path / name, tensors(seed), 2) for name, seed in (("old", 0), ("new", 1)))
    done("diff", "--format", form, old, new, tmp_path / "delta")
    alone, with_base = (json.loads(done("inspect", "--json", tmp_path / "delta", *more)) for more in ([], ["--base", old]))
    assert alone["format"] == with_base["format"] == form
    assert alone["changed"] is None, "tensors as small as these have an arc_v2 payload in arc_v3 too"
    before, after = tensors(0), tensors(1)
    assert with_base["changed"] == sum(int((before[name] != after[name]).sum()) for name in before if before[name].dtype.itemsize > 1)
    assert with_base["weights_bytes"] == sum(tensor.nbytes for tensor in before.values())
    assert [tensor["name"] for tensor in with_base["tensors"]] == sorted(before)
    assert form in done("inspect", tmp_path / "delta")
    assert "times smaller" in done("inspect", tmp_path / "delta", "--base", old)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    old = save_sharded(tmp_path / "old", tensors(0), 2)
    new = save_sharded(tmp_path / "new", tensors(1), 3)
    assert "of-0000" in refused("diff", "--format", "arc_v2", old, new, tmp_path / "delta")
    assert "--codec is for deltas of bd1" in refused("diff", "--format", "arc_v2", "--codec", "fast", old, old, tmp_path / "delta")
    assert "--workers is for deltas of bd1" in refused("diff", "--format", "arc_v2", "--workers", 2, old, old, tmp_path / "delta")
    done("diff", "--format", "arc_v2", old, old, tmp_path / "delta")
    assert "--workers is for deltas of bd1" in refused("apply", "--workers", 2, old, tmp_path / "delta", tmp_path / "out")
    assert "these weights have others" in refused("apply", new, tmp_path / "delta", tmp_path / "out")
    assert "no row of bytes" in refused("apply", old, old, tmp_path / "out")
    assert "there is no delta" in refused("apply", old, tmp_path / "nowhere", tmp_path / "out")
    (file, *_) = sorted((tmp_path / "delta").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert file.name in refused("apply", old, tmp_path / "delta", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@FORMAT
def test_the_package_itself_applies_what_the_command_wrote(form: Format, tmp_path: Path) -> None:
    old, new = (save_sharded(tmp_path / name, tensors(seed), 2) for name, seed in (("old", 0), ("new", 1)))
    done("diff", "--format", form, old, new, tmp_path / "delta")
    shutil.copytree(new, tmp_path / "out")
    for file in sorted((tmp_path / "delta").iterdir()):
        run_peer("apply", form, old / file.name, file, tmp_path / "out" / file.name)
        with safe_open(file, "pt") as written:
            assert len(written.metadata()) == len(written.keys())
    assert equal(loaded(tmp_path / "out"), loaded(new))
