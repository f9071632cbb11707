"""The decoder core against `transformers`, family by family, and against itself in other company."""

from pathlib import Path

import pytest
import torch

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.head import token_logprobs
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.models.pads import packed_positions, packed_starts
from tests.models.builders import ILL_CONDITIONED, MODELS, reference, saved

LENGTHS = [5, 37, 130, 1]


def sequences(lengths: list[int], vocab: int = 320) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def packed_logprobs(decoder: Decoder, tokens: list[torch.Tensor], *, exact: bool) -> list[torch.Tensor]:
    """Log-probability of each next token (the last position is scored against token 0)."""
    lengths = [len(t) for t in tokens]
    starts = packed_starts(lengths)
    rows = torch.zeros(starts[-1], dtype=torch.long)
    targets = torch.zeros(starts[-1], 1, dtype=torch.long)
    for start, t in zip(starts, tokens, strict=False):
        rows[start : start + len(t)] = t
        targets[start : start + len(t) - 1, 0] = t[1:]
    hidden = decoder.hidden(rows, packed_positions(lengths), PackedAttention(lengths, exact=exact), AdapterRows(((None, 0, starts[-1]),)))
    logprobs = token_logprobs(hidden, decoder.head_weight, None, targets, decoder.config.logit_softcap)
    return [logprobs[start : start + len(t), 0] for start, t in zip(starts, tokens, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_log_probs_equal_those_of_transformers(family: str, exact: bool, tmp_path: Path) -> None:
    decoder = load_decoder(saved(family, tmp_path), dtype=torch.float32)
    model = reference(family)
    tokens = sequences(LENGTHS)
    with torch.no_grad():
        ours = packed_logprobs(decoder, tokens, exact=exact)
        for sequence, own in zip(tokens, ours, strict=True):
            theirs = model(sequence[None]).logits[0].log_softmax(-1)
            expected = theirs[:-1].gather(1, sequence[1:, None])[:, 0]
            # float32, two layers: other kernels and orders of summation, no more.
            torch.testing.assert_close(own[:-1], expected, rtol=0, atol=3e-4 if family in ILL_CONDITIONED else 1e-5)
            assert len(own) < 2 or (own[:-1] - expected).abs().median() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_a_sequence_has_the_same_bits_in_any_company(family: str, exact: bool, tmp_path: Path) -> None:
    decoder = load_decoder(saved(family, tmp_path), dtype=torch.float32)
    tokens = sequences([3, 30, 333, 77, 200, 512, 513])
    with torch.no_grad():
        together = packed_logprobs(decoder, tokens, exact=exact)
        for sequence, own in zip(tokens, together, strict=True):
            assert torch.equal(packed_logprobs(decoder, [sequence], exact=exact)[0], own)


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    decoder = load_decoder(saved("qwen3", tmp_path), dtype=torch.float32).requires_grad_(True)
    model = reference("qwen3")
    tokens = sequences([40, 9])
    (-torch.cat([logprobs[:-1] for logprobs in packed_logprobs(decoder, tokens, exact=False)]).sum()).backward()
    for sequence in tokens:
        logprobs = model(sequence[None]).logits[0].log_softmax(-1)[:-1].gather(1, sequence[1:, None])
        (-logprobs.sum()).backward()
    theirs = dict(model.named_parameters())
    assert decoder.embedding.grad is not None
    torch.testing.assert_close(decoder.embedding.grad, theirs["model.embed_tokens.weight"].grad, rtol=1e-4, atol=1e-4)
    qkv = torch.cat([theirs[f"model.layers.1.self_attn.{part}_proj.weight"].grad for part in "qkv"])
    torch.testing.assert_close(decoder.layers[1].qkv.grad, qkv, rtol=1e-4, atol=1e-4)


def test_a_sharded_directory_loads_the_same_weights(tmp_path: Path) -> None:
    whole = load_decoder(saved("llama", tmp_path / "whole"), dtype=torch.float32)
    saved("llama", tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    sharded = load_decoder(tmp_path / "sharded", dtype=torch.float32)
    for (name, one), (_, other) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_the_probe_finds_this_machine_bit_exact_for_small_shapes(tmp_path: Path) -> None:
    decoder = load_decoder(saved("qwen3", tmp_path), dtype=torch.float32)
    assert probe(decoder).failures == ()
