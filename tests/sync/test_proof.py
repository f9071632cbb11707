"""Weights in memory are proved to be those of a version, in every form in which they are computed with."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.models.factors import Factors
from bloomery.models.families import FAMILIES
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.models.packed import pack, pack_in_place
from bloomery.models.products import can_pack
from bloomery.models.published_names import published_factor
from bloomery.models.tensor_bytes import Packed
from bloomery.sync import live
from bloomery.sync import proof as proof_module
from bloomery.sync.base import base_key, base_state, expected_base, read_state, write_state
from bloomery.sync.live import hash_on_device, hash_tensor
from bloomery.sync.manifest import Manifest, verify
from bloomery.sync.proof import Expected, Proof, expected, prove
from bloomery.sync.state_hash import hash_elements, total
from bloomery.train import snapshot
from bloomery.types.errors import Corrupt
from tests.models.builders import saved
from tests.train import builders
from tests.train.builders import BASE_HASH, SAVE, learn, run, step, supervised, train

DTYPES = (torch.float32, torch.bfloat16)
QUICK = "qwen3_moe"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = saved(family, tmp_path_factory.mktemp(family))
        return made[family]

    return find


def proved_base(directory: Path, decoder: Decoder) -> Proof:
    return prove(expected_base(BASE_HASH, base_state(directory, decoder.dtype)), decoder, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in sorted(FAMILIES) if family != QUICK)])
def test_a_base_is_proved_from_its_files_plain_and_packed(family, dtype, directories):
    decoder = load_decoder(directories(family), dtype=dtype)
    plain = proved_base(directories(family), decoder)
    assert plain.numel == sum(tensor.numel() for tensor in stored_tensors(decoder).values())
    # What no tensor of the directory fills is of no model: nothing that is computed with is left out.
    assert plain.numel == sum(tensor.numel() for tensor in (*decoder.parameters(), *decoder.buffers()))
    if can_pack(dtype, decoder.device):
        assert proved_base(directories(family), pack(decoder)).root == plain.root
        pack_in_place(decoder)
        assert proved_base(directories(family), decoder).root == plain.root


def test_the_state_of_a_base_is_kept_and_read_back(directories):
    state = base_state(directories(QUICK), torch.float32)
    assert read_state(write_state(state)) == state
    assert base_key("b" * 4, torch.bfloat16) == "bases/bbbb-bfloat16.json"
    for damaged in (b"", b"[]", b'{"a": 1}', b'{"a": "0"}', b"[" * 100_000):
        with pytest.raises(Corrupt, match="delete it"):
            read_state(damaged)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_device_adds_up_what_the_processor_does(dtype):
    tensor = torch.randn(3, 1001, dtype=torch.float64).mul(50).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    first = 2**40 + 7
    assert hash_on_device(tensor.reshape(-1).view(bits), first) == hash_tensor(tensor, first)


class Version:
    """A published adapter, or a whole model, and what loads it."""

    def __init__(self, model: Decoder, **lora: object) -> None:
        self.base, shelf = model, builders.MemoryShelf()
        published = train(run(model, shelf, **lora), [learn(supervised([20, 40])), step(3e-2), SAVE])[-1]
        self.manifest = Manifest.from_json(shelf.blobs[f"manifests/{published.version}"])
        self.blob = shelf.blobs[self.manifest.key]

    def load(self) -> tuple[Decoder, FusedAdapter | None]:
        if self.manifest.kind == "full":
            return snapshot.read_model(self.blob, self.base), None
        return self.base, snapshot.read(self.blob, self.base, rank=self.manifest.rank, alpha=self.manifest.alpha)

    def expected(self) -> Expected:
        return expected(self.manifest, verify(self.manifest, self.blob), self.blob)


FORMS = [
    {"rank": 8, "alpha": 32.0},
    # Neither of these scales is a power of two: what is computed with cannot be divided back.
    {"rank": 8, "alpha": 12.0},
    {"rank": 5, "alpha": 7.0},
    {"rank": 16, "alpha": 16.0},
    {"rank": 0},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", FORMS)
@pytest.mark.parametrize("experts", [False, True])
def test_a_version_is_proved_by_the_root_of_its_manifest(dtype, lora, experts):
    version = Version(builders.decoder(dtype=dtype, experts=experts), **lora)
    decoder, adapter = version.load()
    proof = prove(version.expected(), decoder, adapter)
    assert proof.root == version.manifest.state
    assert proof.numel == sum(tensor.numel() for tensor in Packed(version.blob).values())


@pytest.mark.parametrize("lora", FORMS)
def test_a_single_bit_anywhere_is_caught(lora):
    version = Version(builders.decoder(), **lora)
    decoder, adapter = version.load()
    known = version.expected()
    places = {name: view.values for name, view in live.adapter_views(adapter).items()} if adapter is not None else stored_tensors(decoder)
    for name, values in places.items():
        at = tuple(size - 1 for size in values.shape)
        before = values[at].clone()
        values.view(torch.int32)[at] ^= 1
        with pytest.raises(Corrupt, match=r"1 of .* tensors differ, first") as caught:
            prove(known, decoder, adapter)
        assert name in str(caught.value)
        values[at] = before
    prove(known, decoder, adapter)


@pytest.mark.parametrize("elements", [1, 100, 700])
def test_factors_that_are_read_a_part_at_a_time_are_proved_too(elements, monkeypatch):
    version = Version(builders.decoder(), rank=8, alpha=12.0)
    decoder, adapter = version.load()
    for module in (live, proof_module):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", elements)
    assert prove(version.expected(), decoder, adapter).root == version.manifest.state
    pad = next(tensor for tensor in adapter.tensors if (tensor == 0).any())
    pad[tuple((pad == 0).nonzero()[0])] = 1.0
    with pytest.raises(Corrupt, match="1 numbers around an adapter's factors"):
        prove(version.expected(), decoder, adapter)


def test_another_scale_is_caught():
    version = Version(builders.decoder(), rank=8, alpha=12.0)
    adapter = snapshot.read(version.blob, version.base, rank=8, alpha=16.0)
    with pytest.raises(Corrupt, match=r"15 of 30 tensors differ"):
        prove(version.expected(), version.base, adapter)


def test_numbers_around_the_factors_are_caught():
    version = Version(builders.decoder(), rank=5, alpha=7.0)
    decoder, adapter = version.load()
    known = version.expected()
    for tensor in adapter.tensors:
        tensor.data[..., -1, -1] = -0.0 if tensor.data[..., -1, -1] == 0 else tensor.data[..., -1, -1]
    with pytest.raises(Corrupt, match="around an adapter's factors"):
        prove(known, decoder, adapter)


def test_a_version_of_format_1_is_proved_by_its_digests():
    version = Version(builders.decoder(), rank=8, alpha=12.0)
    decoder, adapter = version.load()
    root = version.manifest.state
    old = version.manifest.to_json().replace(b'"format":2', b'"format":1')
    version.manifest = of_format_1(old)
    assert prove(version.expected(), decoder, adapter).root == root


def test_a_whole_model_whose_manifest_has_another_hash_than_its_values_is_refused_in_memory():
    version = Version(builders.decoder(), rank=0)
    first, *others = version.manifest.tensors
    version.manifest = msgspec.structs.replace(version.manifest, tensors=(msgspec.structs.replace(first, state="0" * 32), *others))
    with pytest.raises(Corrupt, match=f"1 of .* tensors differ, first `{first.name}`"):
        prove(version.expected(), *version.load())


def of_format_1(data: bytes) -> Manifest:
    fields = json.loads(data)
    del fields["state"], fields["tokenizer_hash"]
    for each in fields["tensors"]:
        del each["state"]
    return Manifest.from_json(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize("packed", [False, True])
def test_a_round_of_scrubbing_looks_at_every_element_and_names_what_changed(packed):
    decoder = builders.decoder()
    states: Mapping = {
        name: hash_elements(tensor.reshape(-1).view(torch.int32).numpy().view("uint32"), live.first_indices(numels(decoder))[name])
        for name, tensor in stored_tensors(decoder).items()
    }
    if packed:
        pack_in_place(decoder)
    proof = prove(Expected("v", total(states.values()), states), decoder, None)
    for _ in range(2):
        assert sum(turns(proof)) == proof.numel
    with torch.no_grad():
        decoder.layers[1].attention_norm[3] += 1
    with pytest.raises(Corrupt, match=r"not in memory any more .* tensor `model.layers.1.input_layernorm.weight`, some have changed"):
        turns(proof)


def numels(decoder: Decoder) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in stored_tensors(decoder).items()}


def turns(proof: Proof) -> list[int]:
    """One round, a 64th at a time."""
    done: list[int] = []
    while sum(done) < proof.numel:
        done.append(proof.scrub(proof.numel // 64))
    return done


def test_small_factors_are_read_together_and_hash_as_they_do_alone(monkeypatch):
    version = Version(builders.decoder(), rank=5, alpha=7.0)
    _, adapter = version.load()
    together = live.pieces(version.base, adapter)
    views, firsts = live.adapter_views(adapter), live.tensor_firsts(version.base, adapter)
    alone = {name: hash_tensor(view.values, firsts[name]) for name, view in views.items()}
    assert len(together) == 1
    assert live.tensor_states(live.hash_pieces(together)) == alone
    # Fewer elements than some of the factors have: those are read a few rows at a time, and others still together.
    monkeypatch.setattr(live, "PIECE_ELEMENTS", 700)
    apart = live.pieces(version.base, adapter)
    assert len(apart) > 1
    assert {len(piece.parts) == 1 for piece in apart} == {True, False}
    assert all(piece.numel <= 700 or len(piece.parts) == 1 for piece in apart)
    assert live.tensor_states(live.hash_pieces(apart)) == alone
    assert live.hash_tensors([view.values for view in views.values()], 0) == list(alone.values())
    proof = prove(version.expected(), version.base, adapter)
    assert proof.root == version.manifest.state


def test_an_adapter_holds_what_would_fill_another_one_with_its_bits_and_nothing_else():
    version = Version(builders.decoder(), rank=5, alpha=7.0)
    _, adapter = version.load()
    tensors = {published_factor(name): tensor for name, tensor in Packed(version.blob).items()}
    factors = {
        name: Factors(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in dict.fromkeys(each.rpartition(".")[0] for each in tensors)
    }
    assert adapter.holds(factors)
    for tensor in adapter.tensors:
        # The last row and column lie around the factors where ranks are padded.
        for at in (tuple(0 for _ in tensor.shape), tuple(size - 1 for size in tensor.shape)):
            bits = tensor.view(torch.int32)
            bits[at] ^= 1
            assert not adapter.holds(factors)
            bits[at] ^= 1
    assert adapter.holds(factors)
