"""What a process proves of itself before it listens, and what it says of it."""

import signal
from pathlib import Path

import msgspec
import pytest
import torch

from bloomery.engine.proving import prove_base
from bloomery.infer.probe_prompt import ask_probe
from bloomery.infer.sampler import Sampler
from bloomery.infer.versions import Model
from bloomery.models.config import RopeConfig
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.load import load_decoder
from bloomery.models.rope import Rope
from bloomery.sync.base import base_key, base_state, read_state, write_state
from bloomery.sync.manifest import Manifest
from bloomery.sync.proof import as_it_is
from bloomery.sync.publish import manifest_key
from bloomery.sync.state_hash import StateHash
from bloomery.types.errors import Corrupt
from bloomery.types.generation import SampleFinished, Weights
from bloomery.types.operations import SaveSnapshot, SnapshotResult
from bloomery.types.protocol import CheckpointWritten, EngineStatus
from tests.engine.faults import NOT_THOSE
from tests.engine.harness import BASE, Engine, engine, history
from tests.infer.builders import BASE as BASE_WEIGHTS
from tests.infer.builders import Adapters, request
from tests.infer.test_versions import other_model
from tests.train.builders import decoder

DOCUMENT = base_key(BASE, torch.float32)


def probe_of(sampling: Decoder, training: Decoder, *, packed: bool = False):
    sampler = Sampler(sampling, Adapters(sampling), form=Form(packed=packed))
    return ask_probe(sampler, Model(BASE_WEIGHTS.version, training, None), exact=True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_probe_prompt_is_answered_with_the_trainers_bits(packed):
    model = decoder()
    found = probe_of(model, model, packed=packed)
    assert (found.tokens, found.max_abs, found.bit_equal) == (31, 0.0, True)


def test_a_sampler_of_other_weights_does_not_answer_as_the_trainer_would():
    model = decoder()
    with pytest.raises(Corrupt, match="does not answer the probe prompt as the trainer would"):
        probe_of(other_model(model, 1), model)


def test_nor_does_one_that_computes_otherwise_with_the_same_weights():
    model, twin = decoder(), decoder()
    twin.rope = twin.full_rope = Rope(RopeConfig(kind="default", theta=10.0, scaling=model.config.rope.scaling), model.config.head_dim)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(Corrupt, match="probe prompt"):
        probe_of(twin, model)


def test_rounding_alone_is_served_and_not_called_equal():
    model, near = decoder(), decoder()
    near.norm.data *= 1 + 1e-6
    found = probe_of(near, model)
    assert not found.bit_equal
    assert 0 < found.max_abs < 1e-3


@pytest.mark.parametrize("trains", [True, False])
def test_plain_weights_beside_packed_ones_are_proved_where_something_trains_with_them(trains: bool) -> None:
    model = decoder()
    known, sampler = as_it_is("base", model).expected, Sampler(model, Adapters(model), form=Form(packed=True))
    assert sampler.computed_with(model) is not model
    assert len(prove_base(known, sampler, model, trains=trains)) == 1 + trains
    with torch.no_grad():
        model.get_parameter("layers.1.qkv").view(-1)[0] += 1
    if trains:
        with pytest.raises(Corrupt, match="start again"):
            prove_base(known, sampler, model, trains=True)
    else:
        assert len(prove_base(known, sampler, model, trains=False)) == 1


@pytest.mark.slow
def test_an_engine_says_what_it_proved_and_which_versions_it_holds(model: Path, tmp_path: Path):
    with engine(model, tmp_path) as one:
        with one.connect() as api:
            assert api.welcome.proved is not None
            state = read_state(one.blobs.get(DOCUMENT))
            assert state == base_state(model, torch.float32)
            assert api.welcome.proved.elements == elements_of(model)
            assert api.welcome.proved.probe_bit_equal == api.welcome.bit_exact
            assert api.wait(EngineStatus).tokens_sampled == 0
            api.open()
            api.execute(0, *history(1), SaveSnapshot(template_hash="t"))
            published = api.done(2).result
            assert isinstance(published, SnapshotResult)
        with engine(model, tmp_path, role="replica") as replica, replica.connect() as api:
            weights = Weights(version=published.version, key=published.key)
            api.send(asked_of(weights))
            api.events("r", until=lambda event: isinstance(event, SampleFinished))
            status = api.wait(EngineStatus, lambda status: bool(status.proved_versions))
            manifest = Manifest.from_json(one.blobs.get(manifest_key(published.version)))
            held = status.proved_versions[published.version]
            assert held.root == manifest.state
            assert held.probe is not None
            assert (held.probe.expected, held.probe.against, held.probe.bit_equal, held.probe.tells) == ("published", BASE, True, True)
            assert held.probe.moved == held.probe.predicted > 0
            assert manifest.tokenizer_hash != ""
            assert status.condemned == {}


@pytest.mark.slow
def test_a_replica_proves_a_whole_model_in_the_form_that_stays_there(model: Path, tmp_path: Path):
    with engine(model, tmp_path) as one, one.connect() as api:
        api.open(rank=0)
        api.execute(0, *history(1), SaveSnapshot(template_hash="t"))
        published = api.done(2).result
        assert isinstance(published, SnapshotResult)
        with engine(model, tmp_path, role="replica") as replica, replica.connect() as serving:
            serving.send(asked_of(Weights(version=published.version, key=published.key)))
            serving.events("r", until=lambda event: isinstance(event, SampleFinished))
            status = serving.wait(EngineStatus, lambda status: bool(status.proved_versions))
            held = status.proved_versions[published.version]
            assert held.root == Manifest.from_json(one.blobs.get(manifest_key(published.version))).state
            assert held.probe is not None
            assert (held.probe.expected, held.probe.bit_equal, held.probe.tells) == ("published", True, True)


def elements_of(model: Path) -> int:
    return sum(tensor.numel() for tensor in load_decoder(model, dtype=torch.float32).parameters())


def asked_of(weights: Weights):
    return msgspec.structs.replace(request("r", list(range(20))), weights=weights)


@pytest.mark.slow
def test_an_engine_whose_base_is_not_the_one_that_was_proved_never_listens(model: Path, tmp_path: Path):
    with engine(model, tmp_path) as one:
        one.connect().close()
        state = read_state(one.blobs.get(DOCUMENT))
        one.blobs.put(DOCUMENT, write_state(state | {"model.norm.weight": state["model.norm.weight"] + StateHash(1, 1)}))
    again = Engine(model, tmp_path)
    again.start()
    assert again.died() != 0
    assert NOT_THOSE in again.log()
    assert "`model.norm.weight`" in again.log()
    assert "or delete its document under bases/" in again.log()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found", "advice"),
    [
        ("loading", NOT_THOSE, "start again; if it stays so, restore the model's files"),
        ("sampling", "does not answer the probe prompt as the trainer would", "Run `bloomery fidelity` to find where they part"),
    ],
)
def test_an_engine_that_cannot_prove_its_base_ends_before_it_listens_and_says_what_to_do(
    fault: str, found: str, advice: str, model: Path, tmp_path: Path
):
    with engine(model, tmp_path, fault=fault) as one:
        assert one.died() > 0
        assert not one.socket.exists()
        last = one.log().splitlines()[-1]
        assert found in last
        assert advice in last
        one.fault = None
        one.start()
        with one.connect() as api:
            assert api.welcome.proved is not None


@pytest.mark.slow
def test_an_engine_whose_base_changes_in_memory_ends_names_what_it_has_written_and_goes_on_from_there_in_another_life(model: Path, tmp_path: Path):
    with engine(model, tmp_path, fault="memory") as one:
        with one.connect() as api:
            proved = api.welcome.proved
            api.open()
            api.execute(0, *history(1))
            checkpoint = api.wait(CheckpointWritten)
            api.execute(2, SaveSnapshot(template_hash="t"))
            published = api.done(2).result
            assert isinstance(published, SnapshotResult)
            assert one.process is not None
            one.process.send_signal(signal.SIGUSR1)
            assert one.died() > 0
        last = one.log().splitlines()[-1]
        assert "is not in memory any more what it was proved to be" in last
        assert "of tensor `model.norm.weight`, some have changed since" in last
        assert f"checkpoint `{checkpoint.key}`" in last
        assert f"version {published.version}" in last
        assert "To be sure, go back to a checkpoint from before" in last
        one.fault = None
        one.start()
        with one.connect() as api:
            assert api.welcome.proved is not None
            assert proved is not None
            assert api.welcome.proved.root == proved.root
            assert api.open(checkpoint=checkpoint.key, last_seq=checkpoint.seq).error is None
