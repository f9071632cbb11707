"""What lies in memory is looked at again: in parts that no step waits for, also in an engine that is embedded in somebody's process."""

import asyncio

import pytest
import torch

from bloomery.infer import scrub
from bloomery.infer.scrub import Scrub
from bloomery.models.decoder import Decoder
from bloomery.models.packed import pack
from bloomery.sync.proof import as_it_is
from bloomery.types.errors import BloomeryError, Corrupt, Unavailable
from bloomery.types.generation import SampledToken, Weights
from bloomery.types.serving import MODEL
from tests.infer.builders import Adapters, adapter, sampler
from tests.infer.test_engine_protocol import answer, ask, tokens_of
from tests.infer.unhurried import UnhurriedEngine
from tests.train.builders import decoder

WAIT_S = 60.0


def one_round(looks: Scrub) -> None:
    begun = looks.rounds
    while looks.rounds == begun:
        looks.take_turn()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_larger_than_a_turn_is_read_beside_the_steps_and_a_change_is_found(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    read = pack(model) if packed else model
    monkeypatch.setattr(scrub, "TURN_ELEMENTS", 1000)
    looks = Scrub([as_it_is("base", read)], sampler(model), every_s=0)
    looks.take_turn()
    one_round(looks)
    one_round(looks)
    with torch.no_grad():
        read.layers[1].attention_norm[3] += 1
    with pytest.raises(Corrupt, match=r"input_layernorm.weight`, some have changed"):
        one_round(looks)


def test_a_turn_is_a_64th_of_all_that_is_in_memory_and_not_of_each_of_its_parts() -> None:
    model = decoder()
    parts = 100
    looks = Scrub([as_it_is(f"base {number}", model) for number in range(parts)], sampler(model), every_s=0)
    for _ in range(2 * parts):
        looks.take_turn()
    assert looks.rounds == 1
    model.norm.data[3] *= 1.5
    with pytest.raises(Corrupt, match="some have changed since"):
        looks.take_turn()


def embedded(model: Decoder) -> UnhurriedEngine:
    return UnhurriedEngine(model, Adapters(model, {"v": adapter(model, 0)}), version="base", scrub_s=0)


@pytest.mark.parametrize("tensor", ["norm", "layers.1.mlp.down"])
async def test_an_embedded_engine_whose_decoder_changes_closes_and_says_why(tensor: str) -> None:
    """Be it in what requests are computed with, or in what only updates are copied from where matrices are packed."""
    model = decoder()
    async with asyncio.timeout(WAIT_S), embedded(model) as engine:
        engine.hold("r")
        events = engine.generate(ask("r", live=MODEL, max_tokens=900))
        assert isinstance(await anext(events), SampledToken)
        model.get_parameter(tensor).data[3] *= 1.5
        with pytest.raises(BloomeryError, match=r"closed, because .* some have changed since"):
            async for _ in events:
                pass
        with pytest.raises(Unavailable, match="some have changed since"):
            await engine.metrics()


async def test_an_update_that_changes_in_memory_is_taken_out_of_service_and_others_are_served() -> None:
    model = decoder()
    async with asyncio.timeout(WAIT_S), embedded(model) as engine:
        await engine.load_adapter("tuned", Weights(version="v", key="k"))
        await engine.begin_update("tuned", "new")
        await engine.commit("tuned", "keep")
        held = engine._sampler.versions.model("new")
        assert held is not None
        assert held.adapter is not None
        engine.hold("r")
        events = engine.generate(ask("r", live="tuned", max_tokens=900))
        assert isinstance(await anext(events), SampledToken)
        held.adapter.tensors[3].data[0, 0] += 2**-10
        with pytest.raises(BloomeryError, match="some have changed since"):
            async for _ in events:
                pass
        assert "new" not in engine._sampler.versions.held
        assert len(tokens_of(await answer(engine, ask("other", live=MODEL, max_tokens=2)))) == 2
