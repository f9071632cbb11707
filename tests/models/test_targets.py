"""What adapters can be on: each target is the rows of ours that its stored tensor fills, in every family."""

from pathlib import Path

import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.models.families import read_config
from bloomery.models.names import module_of, stored_places
from bloomery.models.targets import UNEMBED, Target, adapter_targets
from tests.models.builders import MODELS, saved


@pytest.mark.parametrize("family", MODELS)
def test_a_target_is_the_rows_that_its_stored_tensor_fills(family: str, tmp_path: Path) -> None:
    config = read_config(saved(family, tmp_path))
    parameters = dict(Decoder(config, dtype=torch.float32).named_parameters())
    places = {module_of(name).removeprefix("model.").removesuffix(".weight"): place for name, place in stored_places(config)}
    targets = adapter_targets(config, unembed=False)
    assert targets
    for name, target in targets.items():
        assert parameters[target.parameter].shape == (*target.lead, target.parameter_rows, target.inputs), name
        if name in places:
            place = places[name]
            assert place.parameter == target.parameter
            if not target.experts:
                assert (place.rows, place.shape) == (target.rows, (target.outputs, target.inputs))
        else:
            own = places[_of_expert(name)]
            assert (own.parameter, own.rows, own.expert, own.shape) == (target.parameter, target.rows, 0, (target.outputs, target.inputs))


def _of_expert(name: str) -> str:
    """The first expert's."""
    module, _, projection = name.rpartition(".")
    return f"{module}.experts.0.{projection}"


def test_the_head_is_a_target_whatever_it_is_tied_to(tmp_path: Path) -> None:
    config = read_config(saved("qwen3", tmp_path))
    assert adapter_targets(config, attention=False, mlp=False) == {UNEMBED: Target(UNEMBED, 320, 0, outputs=320, inputs=64)}
