"""`bloomery sync` over directories and files that `safetensors` wrote, read again by it."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from bloomery.cli.main import app
from bloomery.sync.codec.choose import CODECS
from bloomery.sync.codec.delta import CHOICES
from bloomery.sync_files.atomic import new_directory, new_file
from bloomery.types.errors import Conflict

CHOSEN = [choice for choice, codec in CHOICES.items() if codec is None or codec in CODECS]
Tensors = dict[str, torch.Tensor]


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["sync", *map(str, arguments)])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def tensors(seed: int) -> Tensors:
    """Of a small model in several dtypes; the next seed is a step of training further."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "model.embed.weight": (torch.randn(500, 64, generator=generator) * 0.02).bfloat16(),
        "model.layers.0.mlp.weight": (torch.randn(300, 64, generator=generator) * 0.02).bfloat16(),
        "model.layers.0.norm.weight": torch.randn(64, generator=generator),
        "model.layers.0.scale": torch.rand(7, generator=generator).to(torch.float8_e4m3fn),
        "steps": torch.tensor(12),
        "nothing": torch.zeros(0, 3, dtype=torch.float16),
    }
    for step in range(1, seed + 1):
        generator.manual_seed(step)
        for name in ("model.embed.weight", "model.layers.0.mlp.weight", "model.layers.0.norm.weight"):
            moved = torch.rand(found[name].shape, generator=generator) < 0.01
            found[name] = torch.where(moved, found[name] * 1.01, found[name])
        found["steps"] = found["steps"] + 1
    return found


def save_sharded(directory: Path, weights: Tensors, shards: int) -> Path:
    """As `save_pretrained` does, and with what lies beside weights."""
    directory.mkdir()
    names = list(weights)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[number::shards]}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[number::shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "small"}')
    (directory / "1_pooling").mkdir()
    (directory / "1_pooling" / "config.json").write_text("{}")
    return directory


def loaded(path: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        found |= load_file(file)
    return found


def equal(one: Tensors, two: Tensors) -> bool:
    def bits(tensor: torch.Tensor) -> Any:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.keys() == two.keys() and all(one[name].shape == two[name].shape and torch.equal(bits(one[name]), bits(two[name])) for name in one)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Four steps of a training, sharded in as many ways."""
    return [save_sharded(tmp_path / f"step-{step}", tensors(step), step + 1) for step in range(4)]


@pytest.mark.parametrize("codec", CHOSEN)
def test_what_a_delta_makes_of_the_old_directory_is_the_new_one(codec: str, models: list[Path], tmp_path: Path) -> None:
    (models[0] / "pytorch_model.bin").write_bytes(b"what the model was before")
    (models[0] / "link").symlink_to(tmp_path)
    (models[1] / "config.json").write_text("{}")
    said = done("diff", models[0], models[1], tmp_path / "delta", "--codec", codec)
    assert f"{tmp_path / 'delta'}: " in said
    assert "times smaller than the weights" in said
    assert "not in the delta: config.json, which differ too" in said
    said = done("apply", models[0], tmp_path / "delta", tmp_path / "deep" / "out", "--workers", 2)
    out = tmp_path / "deep" / "out"
    assert equal(loaded(out), tensors(1))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        *("1_pooling/config.json", "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json")
    ]
    assert "left out: link, pytorch_model.bin" in said
    assert (out / "config.json").read_text() == (models[0] / "config.json").read_text()
    assert equal(loaded(models[0]), tensors(0))


def test_several_deltas_are_applied_at_once_and_from_where_the_weights_are_already(models: list[Path], tmp_path: Path) -> None:
    deltas = [tmp_path / f"delta-{step}" for step in range(3)]
    for step, delta in enumerate(deltas):
        done("diff", models[step], models[step + 1], delta)
    for start in range(4):
        done("apply", models[start], *deltas, tmp_path / f"from-{start}")
        assert equal(loaded(tmp_path / f"from-{start}"), tensors(3))
    assert "instead of" in done("merge", *deltas, tmp_path / "merged", "--base", models[0])
    done("diff", models[0], models[3], tmp_path / "direct")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "direct").read_bytes()
    line = refused("apply", models[0], deltas[0], deltas[2], tmp_path / "out")
    assert "delta 2 does not begin where delta 1 ends" in line


def test_programs_are_told_what_was_written(models: list[Path], tmp_path: Path) -> None:
    made = json.loads(done("diff", models[0], models[1], tmp_path / "delta", "--json"))
    assert (made["path"], made["size_bytes"]) == (str(tmp_path / "delta"), (tmp_path / "delta").stat().st_size)
    assert made["changed"] == json.loads(done("inspect", tmp_path / "delta", "--json", "--base", models[0]))["changed"]
    applied = json.loads(done("apply", models[0], tmp_path / "delta", tmp_path / "out", "--json"))
    assert (applied["root"], applied["files"], applied["left"]) == (made["new_root"], 4, [])
    merged = json.loads(done("merge", tmp_path / "delta", tmp_path / "merged", "--json"))
    assert (merged["merged_bytes"], merged["new_root"]) == (made["size_bytes"], made["new_root"])


def test_distances_merge_without_weights_and_what_counts_within_them_does_not(models: list[Path], tmp_path: Path) -> None:
    for codec in CHOSEN:
        for step in range(2):
            done("diff", models[step], models[step + 1], tmp_path / f"{codec}-{step}", "--codec", codec)
    done("merge", tmp_path / "fast-0", tmp_path / "fast-1", tmp_path / "merged", "--codec", "fast")
    done("apply", models[0], tmp_path / "merged", tmp_path / "out")
    assert equal(loaded(tmp_path / "out"), tensors(2))
    if "tight" in CHOSEN:
        line = refused("merge", tmp_path / "tight-0", tmp_path / "tight-1", tmp_path / "none")
        assert "chunks are `tight`, which counts within the old weights" in line
        done("merge", tmp_path / "tight-0", tmp_path / "tight-1", tmp_path / "some", "--base", models[0])


def test_single_files_and_adapters_travel_alike(tmp_path: Path) -> None:
    for step in range(2):
        adapter = {name: tensor for name, tensor in tensors(step).items() if name.startswith("model.layers")}
        (tmp_path / f"adapter-{step}").mkdir()
        save_file(adapter, tmp_path / f"adapter-{step}" / "adapter_model.safetensors")
        (tmp_path / f"adapter-{step}" / "adapter_config.json").write_text("{}")
        save_file(tensors(step), tmp_path / f"{step}.safetensors", {"format": "pt"})
    for name, old, new in (("file", "0.safetensors", "1.safetensors"), ("directory", "adapter-0", "adapter-1")):
        done("diff", tmp_path / old, tmp_path / new, tmp_path / f"{name}.delta")
        done("apply", tmp_path / old, tmp_path / f"{name}.delta", tmp_path / f"{name}.out")
        assert equal(loaded(tmp_path / f"{name}.out"), loaded(tmp_path / new))
    assert (tmp_path / "file.out").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    assert (tmp_path / "directory.out" / "adapter_config.json").exists()


FORMATS = {
    torch.bfloat16: (torch.int16, 7, 8),
    torch.float32: (torch.int32, 23, 8),
    torch.float8_e4m3fn: (torch.int8, 3, 4),
    torch.int64: (torch.int64, 0, 0),
}
"""Whole numbers of as many bits, bits below the exponent, and those of the exponent."""


def surprise_bits(before: Tensors, after: Tensors, *, exponents: bool) -> float:
    """What a code would take that knows how often what occurs: of every element whether it changed, among those of its tensor or of its exponent; of
    every change by how much, among those of its dtype or of its exponent too. Those of more than 127 are one symbol, and an element's bits."""
    asked, told, far_bits = [], [], 0
    for name, tensor in before.items():
        if not tensor.numel():
            continue
        whole, shift, width = FORMATS[tensor.dtype]
        bits = 8 * tensor.dtype.itemsize
        for old, new in zip(*(each[name].reshape(-1).view(whole).tolist() for each in (before, after)), strict=True):
            exponent = (old >> shift) & ((1 << width) - 1)
            asked.append(((tensor.dtype, exponent) if exponents else name, old != new))
            if old != new:
                ordered = [number if number >= 0 or not width else -1 - (number & ((1 << (bits - 1)) - 1)) for number in (old, new)]
                by = ordered[1] - ordered[0]
                told.append(((tensor.dtype, exponent if exponents else None), by if abs(by) <= 127 else "far"))
                far_bits += bits if abs(by) > 127 else 0
    return _surprise(asked) + _surprise(told) + far_bits


def _surprise(told: list[tuple[Any, Any]]) -> float:
    """Of answers, each among those to the same question."""
    answers, questions = Counter(told), Counter(question for question, _ in told)
    return sum(math.log2(questions[question] / answers[question, answer]) for question, answer in told)


def test_inspect_says_what_there_is_and_what_could_be(models: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "delta"
    done("diff", models[0], models[3], delta, "--codec", "fast")
    before, after = tensors(0), tensors(3)
    assert not torch.equal(before["model.layers.0.norm.weight"], after["model.layers.0.norm.weight"]), "something moves far"
    changed = sum(int((before[name] != after[name]).sum()) for name in before if before[name].dtype != torch.float8_e4m3fn)
    alone = json.loads(done("inspect", delta, "--json"))
    assert (alone["kind"], alone["size_bytes"]) == ("delta", delta.stat().st_size)
    assert alone["weights_bytes"] == sum(tensor.numel() * tensor.dtype.itemsize for tensor in before.values())
    assert [tensor["name"] for tensor in alone["tensors"]] == sorted(before)
    assert sum(codec["chunks"] for codec in alone["codecs"].values()) == alone["chunks"]
    with_base = json.loads(done("inspect", delta, "--json", "--base", models[0]))
    assert with_base["changed"] == changed
    assert with_base["changed_share"] == pytest.approx(changed / with_base["elements"])
    for name, known in (("order0", False), ("conditioned", True)):
        bound, least = with_base["bounds"][name], surprise_bits(before, after, exponents=known)
        assert bound["bits_per_changed"] == pytest.approx(least / changed)
        assert bound["size_bytes"] == pytest.approx(least / 8)
        assert bound["ratio"] == pytest.approx(with_base["weights_bytes"] / (least / 8))
    assert all(with_base["speeds"][name] > 0 for name in ("verify_gb_s", "decode_gb_s"))
    said = done("inspect", delta, "--base", models[0])
    assert f"changed   {changed:,} elements" in said
    assert "bits each with them" in said
    assert "these weights are not those that the delta starts from" in refused("inspect", delta, "--base", models[2])


def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing_behind(models: list[Path], tmp_path: Path) -> None:
    delta, out = tmp_path / "delta", tmp_path / "out"
    done("diff", models[0], models[1], delta)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damaged = tmp_path / "damaged"
    damaged.write_bytes(before[delta][:-40] + bytes([before[delta][-40] ^ 1]) + before[delta][-39:])
    save_sharded(tmp_path / "other", {"a": torch.zeros(3)}, 1)
    assert refused("diff", models[0], models[1], delta) == f"error: {delta} is there already: choose another name"
    assert "is there already" in refused("apply", models[0], delta, models[1])
    assert "is there already" in refused("merge", delta, models[1])
    assert refused("apply", models[0], damaged, out) == f"error: {damaged}: a delta does not match the hash at its end: it is damaged"
    assert "the weights are of another model than the delta" in refused("apply", tmp_path / "other", delta, out)
    assert "the weights are not those that the delta starts from" in refused("apply", models[2], delta, out)
    assert "is within" in refused("apply", models[0], delta, models[0] / "out")
    assert refused("apply", tmp_path / "none", delta, out) == f"error: there is no file or directory {tmp_path / 'none'}"
    assert refused("inspect", tmp_path / "none") == f"error: there is no delta {tmp_path / 'none'}"
    assert f"{models[0] / 'config.json'}: " in refused("diff", models[0] / "config.json", models[1], out)
    assert "the weights are of another model than the delta" in refused("inspect", delta, "--base", tmp_path / "other")
    assert "with the same tensors" in refused("diff", models[0], tmp_path / "other", out)
    assert not out.exists()
    assert not list(tmp_path.rglob(".*"))
    assert {path: path.read_bytes() for path in before} == before


def test_an_index_that_leads_out_of_its_directory_is_refused(models: list[Path], tmp_path: Path) -> None:
    (models[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../step-1/model-00001-of-00002.safetensors"}}))
    assert "only files of the same directory are read" in refused("diff", models[0], models[1], tmp_path / "out")
    (models[0] / "model.safetensors.index.json").write_text("[")
    assert f"the index of {models[0]}" in refused("diff", models[0], models[1], tmp_path / "out")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("one", "two"):
        save_file({"a": torch.zeros(3)}, tmp_path / "model" / f"{name}.safetensors")
    assert "tensor `a` is in one.safetensors and in two.safetensors" in refused("diff", tmp_path / "model", tmp_path / "model", tmp_path / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from bloomery.sync_files import actions
phase, action, *paths = sys.argv[1:]
*paths, out = map(Path, paths)
def progress(at, done, total):
    if at == phase and done * 2 >= total:
        os.kill(os.getpid(), signal.SIGKILL)
if action == "apply":
    actions.apply(paths[0], paths[1:], out, workers=1, progress=progress)
else:
    actions.diff(*paths, out, codec="auto", workers=1, progress=progress)
"""


@pytest.mark.parametrize(("phase", "action"), [("copy", "apply"), ("apply", "apply"), ("encode", "diff")])
def test_kill_9_leaves_nothing_that_looks_whole_and_the_next_one_cleans_up(phase: str, action: str, models: list[Path], tmp_path: Path) -> None:
    done("diff", models[0], models[1], tmp_path / "delta")
    second, out = {"apply": tmp_path / "delta", "diff": models[1]}[action], tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, phase, action, models[0], second, out], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [path.name for path in tmp_path.glob(".*")] == [".out.partial"]
    done(action, models[0], second, out)
    assert not list(tmp_path.glob(".*"))
    if action == "apply":
        assert equal(loaded(out), tensors(1))
    else:
        assert out.read_bytes() == (tmp_path / "delta").read_bytes()


def test_a_full_disk_is_said_in_a_line(models: list[Path], tmp_path: Path) -> None:
    done("diff", models[0], models[1], tmp_path / "delta")

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    command = [sys.executable, "-m", "bloomery.cli.main", "sync", "apply", models[0], tmp_path / "delta", tmp_path / "out"]
    failed = subprocess.run(command, preexec_fn=little, capture_output=True, text=True, timeout=120, check=False)
    assert (failed.returncode, failed.stderr) == (2, f"error: {tmp_path / 'out'}: File too large\n")
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("made", [new_file, new_directory])
def test_one_writes_and_who_comes_meanwhile_is_refused(made: Any, tmp_path: Path) -> None:
    with made(tmp_path / "out"):
        with pytest.raises(Conflict, match="is being written by another process"), made(tmp_path / "out"):
            pass
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("made", [new_file, new_directory])
def test_what_came_into_its_place_meanwhile_is_not_overwritten(made: Any, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="is there already"), made(tmp_path / "out"):
        (tmp_path / "out").write_text("somebody else's")
    assert (tmp_path / "out").read_text() == "somebody else's"
    assert not list(tmp_path.glob(".*"))


def test_what_was_killed_after_it_had_its_name_is_not_written_to_again(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("whole")
    os.link(tmp_path / "kept", tmp_path / ".out.partial")
    with new_file(tmp_path / "out") as partial:
        partial.file.write(b"another")
    assert ((tmp_path / "kept").read_text(), (tmp_path / "out").read_text()) == ("whole", "another")


def test_where_there_are_no_hard_links_nothing_is_overwritten_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with new_file(tmp_path / "out") as partial:
        partial.file.write(b"whole")
    assert (tmp_path / "out").read_bytes() == b"whole"
    with pytest.raises(Conflict), new_file(tmp_path / "other"):
        (tmp_path / "other").write_text("somebody else's")
    assert (tmp_path / "other").read_text() == "somebody else's"
