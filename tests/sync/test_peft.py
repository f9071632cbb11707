"""Adapters under PEFT's names: what PEFT loads gives the trainer's log-probabilities, the head and experts included."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file

from bloomery.models.load import load_decoder
from bloomery.sync.peft import ADAPTER, CONFIG, peft_config, peft_tensors
from bloomery.types import tensor_file
from tests.models.builders import reference, saved
from tests.train import builders
from tests.train.builders import finish, learn, logprobs, step, supervised, train

pytestmark = [
    # PEFT asks transformers for a property under its old name, and warns that a tied head and the embedding are one: nothing is merged here.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    # PEFT doubles the rank of the fused projections of experts by a pattern, and says that no other module matches it.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning"),
]

DATA = supervised([5, 37, 64], seed=2)


def export(blob: bytes, directory: Path) -> None:
    """The files of a published blob."""
    forms = dict(peft_tensors(tensor_file.places(blob, size=len(blob))))
    values = blob[tensor_file.header_bytes(blob[:8]) :]
    directory.mkdir()
    (directory / ADAPTER).write_bytes(tensor_file.header(forms, {"format": "pt"}) + values)
    (directory / CONFIG).write_bytes(peft_config(forms, base_model="base", rank=8, alpha=32.0))


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3", {}), ("llama", {"train_mlp": False}), ("qwen3_moe", {}), ("qwen3_moe", {"train_attn": False})]
)
def test_peft_gives_the_trainers_logprobs(family: str, lora: dict[str, bool], tmp_path: Path) -> None:
    run = builders.run(load_decoder(saved(family, tmp_path / "base"), dtype=torch.float32), **lora)
    train(run, [learn(supervised([20, 40])), step(3e-2)] * 3)
    export(run.snapshot("t").data, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(reference(family), str(tmp_path / "adapter"))
    for own, example in zip(logprobs(finish(run, learn(DATA, backward=False))), DATA, strict=True):
        tokens, targets = (torch.tensor(values.numpy().astype(np.int64)) for values in (example.tokens, example.inputs["target_tokens"]))
        with torch.no_grad():
            theirs = peft(tokens[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        # float32, two layers: other kernels and another order of summation.
        np.testing.assert_allclose(own, theirs.numpy(), rtol=0, atol=1e-4)


def test_only_names_and_the_stacking_of_experts_change(tmp_path: Path) -> None:
    run = builders.run(builders.decoder(experts=True))
    train(run, [learn(supervised([20])), step()])
    blob = run.snapshot("t").data
    export(blob, tmp_path / "adapter")
    ours, theirs = load(blob), load_file(tmp_path / "adapter" / ADAPTER)
    up, head = "base_model.model.model.layers.1.mlp.experts{}.up_proj.lora_B.weight", "base_model.model.{}.lora_A.weight"
    assert torch.equal(torch.stack([theirs[up.format(f".{expert}")] for expert in range(4)]), ours[up.format("")])
    assert torch.equal(theirs[head.format("lm_head")], ours[head.format("model.unembed_tokens")])
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in ours.values())
    modules = json.loads((tmp_path / "adapter" / CONFIG).read_text())["target_modules"]
    assert modules == ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
