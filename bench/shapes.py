"""Random models of the sizes that the figures name, and random data for them."""

import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bloomery.infer.versions import Model
from bloomery.models import tiny
from bloomery.models.config import DecoderConfig, RopeConfig
from bloomery.models.decoder import Decoder
from bloomery.types.arrays import Array
from bloomery.types.generation import Weights
from bloomery.types.operations import Datum


class Shape(NamedTuple):
    """A Qwen3 of this shape, embeddings tied."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


EMPTY: Final = Shape(4096, 64, 1, 1, 1, 64)
SHAPES: Final = {
    "5M": Shape(4096, 256, 5, 4, 2, 768),
    "30M": Shape(8192, 512, 8, 8, 4, 1536),
    "150M": Shape(4096, 1024, 12, 16, 8, 2816),
}


def decoder(size: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random frozen model."""
    config = DecoderConfig(
        model_type="qwen3",
        **SHAPES[size]._asdict(),
        head_dim=64,
        norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=10_000.0, scaling={"original_max_position_embeddings": 2048}),
        tied_head=True,
        qk_norm=True,
        context=2048,
        windows=(None,) * SHAPES[size].num_layers,
        experts=None,
    )
    model = Decoder(config, dtype=dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def supervised(vocab_size: int, lengths: list[int], seed: int) -> tuple[Datum, ...]:
    """Data whose every token is learned."""
    noise = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = noise.integers(0, vocab_size, length + 1)
        inputs = {"target_tokens": Array.of(tokens[1:].astype(np.int64)), "weights": Array.of(np.ones(length, np.float32))}
        data.append(Datum(tokens=Array.of(tokens[:-1].astype(np.int32)), inputs=inputs))
    return tuple(data)


def write_directory(shape: Shape, place: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of this shape as `save_pretrained` writes it, with the tokenizer of `bloomery-tiny`."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=64,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(dtype).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny.__file__).parent / "weights" / name, place / name)
    return place


class OnlyBase:
    """A source of weights that has one version, the base."""

    def __init__(self, base: Decoder) -> None:
        self._base = base

    def weigh(self, weights: Weights) -> int:
        """Nothing beside the base."""
        return 0

    def load(self, weights: Weights) -> Model:
        """The base."""
        return Model(weights.version, self._base, None)
