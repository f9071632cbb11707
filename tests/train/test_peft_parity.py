"""Log-probabilities and gradients against PEFT on the same random Qwen3, in both directions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from bloomery.models.decoder import Decoder
from bloomery.models.load import load_decoder
from bloomery.train.run import TrainableRun
from tests.models.builders import reference, saved
from tests.train import builders
from tests.train.builders import finish, learn, logprobs, step, supervised, train

# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DATA = supervised([5, 37, 64], seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(saved("qwen3", tmp_path_factory.mktemp("base")), dtype=torch.float32)


def trained_run(model: Decoder) -> TrainableRun:
    trained = builders.run(model, train_unembed=False)
    train(trained, [learn(supervised([20, 40])), step(3e-2)] * 3)
    return trained


def their_logprobs(peft: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for example in DATA:
        tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (example.tokens, example.inputs["target_tokens"]))
        found.append(peft(tokens[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return found


def test_a_snapshot_loads_in_peft_and_scores_alike(model: Decoder, tmp_path: Path) -> None:
    trained = trained_run(model)
    (tmp_path / "adapter_model.safetensors").write_bytes(trained.snapshot("t").data)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 32, "target_modules": TARGETS}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    peft = PeftModel.from_pretrained(reference("qwen3"), str(tmp_path))
    ours = logprobs(finish(trained, learn(DATA, backward=False)))
    with torch.no_grad():
        for own, theirs in zip(ours, their_logprobs(peft), strict=True):
            # float32, two layers: other kernels and another order of summation.
            np.testing.assert_allclose(own, theirs.numpy(), rtol=0, atol=2e-5)


def test_gradients_equal_those_of_peft(model: Decoder) -> None:
    trained = trained_run(model)
    peft = get_peft_model(reference("qwen3"), LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS, lora_dropout=0.0))
    theirs = {
        name.removeprefix("base_model.model.model.").removesuffix(".default.weight"): parameter
        for name, parameter in peft.named_parameters()
        if "lora_" in name
    }
    masters = dict(trained.weights.named(trained.weights.masters))
    assert masters.keys() == theirs.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(masters[name])
    finish(trained, learn(DATA))
    losses = (
        -values * torch.from_numpy(example.inputs["weights"].numpy().copy()) for values, example in zip(their_logprobs(peft), DATA, strict=True)
    )
    torch.cat(list(losses)).sum().backward()
    # float32 gradients of a sum over a hundred tokens, relative to each factor's norm.
    assert builders.relative_difference(builders.gradients(trained), {name: parameter.grad for name, parameter in theirs.items()}) < 1e-5
