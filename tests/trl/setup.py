"""Where TRL runs, the package as it was published in an environment that sees the project's packages behind its own; and the models of both sides.

Every token is a word of its own, so that a text is the same ids for everybody.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.cookbook.setup import ROOT, environment

REQUIREMENTS: Final = ROOT / "requirements-trl.txt"
ENVIRONMENT: Final = ROOT / "build" / "trl"
SCRIPT: Final = Path(__file__).with_name("their_steps.py")

VOCABULARY: Final = 300
PAD, END, FIRST_WORD = 0, 1, 20
"""Tokens from `END` to below `FIRST_WORD` all end a sample, so that rollouts of a random model have lengths of many kinds."""
_RUN_S: Final = 400.0


def write_model(place: Path, seed: int) -> Path:
    """A small random Qwen3 in float32 whose distributions are far from uniform, as a trained model's are."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(place)
    settings = place / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(range(END, FIRST_WORD))}))
    _tokenizer().save_pretrained(place)
    return place


def text(tokens: Sequence[int]) -> str:
    """What has these tokens."""
    return "".join(f" {_word(token)}" for token in tokens)


def their_steps(job: dict[str, Any], folder: Path) -> None:
    """Take the steps of a job with TRL; `their_steps.py` says what it leaves in the folder."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    surroundings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HOME": str(folder), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [str(environment(ENVIRONMENT, REQUIREMENTS)), str(SCRIPT), str(file)],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=folder,
        env={**os.environ, **surroundings},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _word(token: int) -> str:
    return {PAD: "<pad>", END: "<end>"}.get(token, f"w{token}")


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({_word(token): token for token in range(VOCABULARY)}, unk_token=_word(VOCABULARY - 1)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=_word(END), pad_token=_word(PAD))
