"""The kill list, part A, and what of part B lies in the engine.

Silent faults of weights are caught before a token is served, and the same test without the fault serves.
"""

from pathlib import Path

import msgspec
import pytest
import torch

from bloomery.infer.sampler import Sampler
from bloomery.infer.scrub import Scrub
from bloomery.infer.versions import Model
from bloomery.models.load import stored_tensors
from bloomery.sync import live
from bloomery.sync.base import base_state, expected_base
from bloomery.sync.proof import Expected, prove
from bloomery.sync.state_hash import total
from bloomery.train.full import FullParameters
from bloomery.train.lora import Lora
from bloomery.types.errors import Corrupt
from bloomery.types.generation import Generate, Weights
from bloomery.types.operations import Failed, SnapshotResult
from tests.engine.faults import FAULTS, NOT_THOSE, Fault, World, world
from tests.engine.forward_faults import FORWARD_FAULTS
from tests.engine.harness import BASE, Engine, engine
from tests.infer.builders import Answer, answers, drain, generate, prompt, request
from tests.train.builders import BASE_HASH, SAVE, learn, run, step, supervised, train

DOCS = Path(__file__).parents[2] / "docs" / "rl.md"
LATER = {
    "LoRA run as full fine-tuning": "SkyRL#1077",
    "steps that the forward does not see": "miles#2572",
    "weights changed in memory": "trl#5312",
    "another model's files": "open-instruct#1627",
    "weights lost while asleep": "trl#5312",
    "update written past its place": "miles#684",
    "adapters merged in and taken out": "open-instruct#1473",
}
"""Faults with a test of their own, below or, of updates, in `tests/infer/test_staging.py`."""


def asked(request_id: str, weights: Weights, max_tokens: int = 8) -> Generate:
    return msgspec.structs.replace(request(request_id, prompt(20), max_tokens=max_tokens), weights=weights)


def ask(sampler: Sampler, weights: Weights) -> Answer:
    return generate(sampler, asked("r", weights))["r"]


OF_MODELS = tuple(fault for fault in FAULTS if fault.rank == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "alone"),
    [*((fault, False) for fault in FAULTS), *((fault, True) for fault in OF_MODELS)],
    ids=[*(fault.name.replace(" ", "-") for fault in FAULTS), *(f"{fault.name.replace(' ', '-')}-in-a-replica" for fault in OF_MODELS)],
)
def test_a_silent_fault_is_caught_before_a_token_is_served_and_without_it_all_is_served(
    fault: Fault, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = world(tmp_path / "sound", fault.rank, experts=fault.experts)
    assert len(ask(sound.sampler(alone=alone), sound.new).tokens[0]) == 8
    broken = world(tmp_path / "broken", fault.rank, experts=fault.experts)
    sampler = broken.sampler(alone=alone)
    fault.inject(monkeypatch, broken)
    answer = ask(sampler, broken.new)
    assert answer.failure is not None
    assert fault.says in answer.failure.message
    assert isinstance(answer.failure.error(), Corrupt)
    assert answer.tokens == {}
    assert broken.new.version not in sampler.versions.held


def scrub_of(made: World, sampler: Sampler) -> Scrub:
    # What the base is held against is itself: these tests are of what changes afterwards.
    states = live.tensor_states(live.hash_piece(piece) for piece in live.pieces(made.base, None))
    return Scrub([prove(Expected(BASE_HASH, total(states.values()), states), made.base, None)], sampler, every_s=0)


def scrubbed(made: World, sampler: Sampler) -> dict[str, str]:
    """What one round of everything in memory condemns."""
    scrub = scrub_of(made, sampler)
    one_round(scrub)
    return scrub.condemned


def one_round(scrub: Scrub) -> None:
    begun = scrub.rounds
    while scrub.rounds == begun:
        scrub.take_turn()


@pytest.fixture
def held(tmp_path: Path) -> tuple[World, Sampler]:
    """A world whose version `new` is in memory and has been sampled with."""
    made = world(tmp_path, 8)
    sampler = made.sampler()
    assert len(ask(sampler, made.new).tokens[0]) == 8
    return made, sampler


def test_weights_that_change_in_memory_are_taken_out_of_service_and_read_anew(held: tuple[World, Sampler]) -> None:
    made, sampler = held
    before = ask(sampler, made.new)
    assert scrubbed(made, sampler) == {}
    change_in_memory(sampler, made.new)
    condemned = scrubbed(made, sampler)
    assert list(condemned) == [made.new.version]
    assert "some have changed since" in condemned[made.new.version]
    assert made.new.version not in sampler.versions.held
    assert ask(sampler, made.new).told == before.told


def change_in_memory(sampler: Sampler, weights: Weights) -> None:
    """One number of an adapter, by a little."""
    model = sampler.versions.model(weights.version)
    assert model is not None
    assert model.adapter is not None
    model.adapter.tensors[3].data[0, 0] += 2**-10


def test_whoever_runs_with_weights_that_changed_hears_so_and_others_run_on(held: tuple[World, Sampler]) -> None:
    made, sampler = held
    sampler.submit(asked("running", made.new, max_tokens=400))
    sampler.submit(asked("other", made.old, max_tokens=30))
    events = [event for _ in range(5) for event in sampler.step()]
    change_in_memory(sampler, made.new)
    scrubbed(made, sampler)
    found = answers([*events, *drain(sampler)])
    failure = found["running"].failure
    assert failure is not None
    assert "some have changed since" in failure.message
    assert isinstance(failure.error(), Corrupt)
    assert found["other"].reasons == {0: "length"}


def test_a_base_that_changes_in_memory_is_an_error_of_the_process(tmp_path: Path) -> None:
    made = world(tmp_path, 0)
    loaded = made.shelf.load(made.old)
    assert loaded.proof is not None
    scrub = Scrub([loaded.proof], made.sampler(), every_s=0)
    one_round(scrub)
    norm = loaded.decoder.norm.data
    norm[3] = norm[3].nextafter(norm[3] + 1)
    with pytest.raises(Corrupt, match="some have changed since"):
        one_round(scrub)


def test_a_base_that_adapters_are_merged_into_and_taken_out_of_is_an_error_of_the_process(
    held: tuple[World, Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sampler = held
    scrub = scrub_of(made, sampler)
    assert len(ask(sampler, made.old).tokens[0]) == 8
    one_round(scrub)
    load = made.shelf.load

    def merged(weights: Weights) -> Model:
        rows = stored_tensors(made.base)["model.layers.0.self_attn.q_proj.weight"]
        product = torch.full_like(rows, 1 / 3)
        # What is taken out again leaves its rounding.
        rows.add_(product).sub_(product)
        return load(weights)

    monkeypatch.setattr(made.shelf, "load", merged)
    assert len(ask(sampler, made.first).tokens[0]) == 8
    with pytest.raises(Corrupt, match="some have changed since"):
        one_round(scrub)


def test_weights_that_are_read_again_after_sleep_are_proved_again(held: tuple[World, Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    made, sampler = held
    before = ask(sampler, made.new)
    sampler.rest()
    assert made.new.version not in sampler.versions.held
    assert ask(sampler, made.new).told == before.told
    sampler.rest()
    next(fault for fault in FAULTS if fault.name == "cached reload of an adapter").inject(monkeypatch, made)
    failure = ask(sampler, made.new).failure
    assert failure is not None
    assert NOT_THOSE in failure.message


@pytest.mark.slow
def test_a_replica_of_other_files_under_the_same_name_never_listens(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    with engine(model, directory) as trainer, trainer.connect() as api:
        assert api.welcome.proved is not None
        root = api.welcome.proved.root
        assert root == expected_root(model)
        assert api.welcome.proved.probe_bit_equal
    with engine(model, directory, role="replica") as replica, replica.connect() as api:
        assert api.welcome.proved is not None
        assert api.welcome.proved.root == root
    other = copied_with_one_bit_changed(model, tmp_path / "other")
    stranger = Engine(other, directory, role="replica")
    stranger.start()
    assert stranger.died() != 0
    assert NOT_THOSE in stranger.log()


def expected_root(directory: Path) -> str:
    return str(expected_base(BASE, base_state(directory, torch.float32)).root)


def copied_with_one_bit_changed(model: Path, directory: Path) -> Path:
    directory.mkdir()
    for path in model.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-1] ^= 1
        (directory / path.name).write_bytes(data)
    return directory


@pytest.mark.parametrize("rank", [8, 0])
def test_a_run_that_trains_something_else_than_it_says_publishes_nothing(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, rank)
    lessons = [learn(supervised([20])), step(), SAVE]
    assert isinstance(train(made.run, lessons)[-1], SnapshotResult)
    if rank:
        monkeypatch.setattr("bloomery.train.run.Lora", FullParameters)
    else:
        monkeypatch.setattr("bloomery.train.run.FullParameters", lambda base, spec: Lora(base, msgspec.structs.replace(spec, rank=8)))
    failed = train(run(made.base, made.shelf, rank=rank), lessons)[-1]
    assert isinstance(failed, Failed)
    assert "is none of such: nothing is published" in failed.message


def test_a_run_whose_forward_does_not_see_its_steps_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(tmp_path, 8)
    lessons = [learn(supervised([20])), step(), SAVE]
    assert isinstance(train(made.run, lessons)[-1], SnapshotResult)
    monkeypatch.setattr(Lora, "refresh", lambda self: None)
    failed = train(made.run, lessons)[-1]
    assert isinstance(failed, Failed)
    assert "than it would publish" in failed.message


def test_every_fault_stands_in_the_docs_with_its_thread() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    for fault in (*FAULTS, *FORWARD_FAULTS):
        assert any(fault.name in row and all(thread in row for thread in fault.threads) for row in rows), fault.name
    for name, thread in LATER.items():
        assert any(name in row and thread in row for row in rows), name
