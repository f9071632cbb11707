"""At a temperature the sampler tells the trainer's very log-probabilities, of what it draws and of what it scores: equal means equal bits."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bloomery.infer.plan import Limits
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.head import HeadRows, pooled_logprobs
from bloomery.models.kernel_probe import probe
from bloomery.models.native import bindings
from bloomery.models.targets import UNEMBED
from bloomery.types.generation import Generate, SampledToken
from tests.infer.builders import adapter, drain, full_hidden, generate, prompt, request, sampler
from tests.infer.test_prompt import cells
from tests.train.builders import VOCAB, decoder

FORMS = [(torch.float32, False, None), (torch.bfloat16, False, None), (torch.float32, True, None), (torch.float32, False, 6.0)]
TIGHT = Limits(slots=2, token_budget=44)
ROOMY = Limits(slots=16, token_budget=2048, kept_tokens=4096)


def made(dtype: torch.dtype, experts: bool, softcap: float | None) -> Decoder:
    model = decoder(dtype=dtype, experts=experts)
    model.config = dataclasses.replace(model.config, logit_softcap=softcap)
    return model


def trainers(model: Decoder, tokens: Sequence[int], weights: FusedAdapter | None, temperature: float) -> np.ndarray:
    """The trainer's log-probability of every token after the first."""
    hidden_RD = full_hidden(model, tokens, weights)
    targets_R1 = torch.zeros(len(hidden_RD), 1, dtype=torch.long)
    targets_R1[: len(tokens) - 1, 0] = torch.tensor(list(tokens[1:]))
    rows = HeadRows(None if weights is None else weights.get(UNEMBED), 0, len(hidden_RD), temperature)
    with torch.no_grad():
        return pooled_logprobs(hidden_RD, model.head_weight, [rows], targets_R1, model.config.logit_softcap)[: len(tokens) - 1, 0].numpy()


def drawn(
    model: Decoder, adapters: dict[str, FusedAdapter], requests: Sequence[Generate], limits: Limits
) -> dict[tuple[str, int], list[SampledToken]]:
    engine = sampler(model, adapters, limits)
    for each in requests:
        engine.submit(each)
    found: dict[tuple[str, int], list[SampledToken]] = {}
    for event in drain(engine):
        assert not hasattr(event, "code"), event
        if isinstance(event, SampledToken):
            found.setdefault((event.request_id, event.sample), []).append(event)
    return found


def leave_torch_alone(monkeypatch: pytest.MonkeyPatch, model: Decoder) -> None:
    """Without kernels of our own, where bits of torch's do not depend on the batch: on some processors they do, and an engine says so."""
    monkeypatch.setattr(bindings, "available", lambda *tensors: False)
    if not (report := probe(model)).bit_exact:
        pytest.skip(f"torch alone is not bit-exact here: {report.failures[0]}")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize(("dtype", "experts", "softcap"), FORMS)
def test_what_is_drawn_has_the_trainers_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, experts: bool, softcap: float | None, limits: Limits, native: bool
) -> None:
    model, tokens = made(dtype, experts, softcap), prompt(23)
    if not native:
        leave_torch_alone(monkeypatch, model)
    adapters = {"v1": adapter(model, 1), "v2": adapter(model, 2)}
    # Side by side: other temperatures, none, and the likeliest.
    temperatures = {"cold": 0.7, "hot": 1.6, "plain": 1.0, "likeliest": 0.0, "other": 0.7}
    versions = {"cold": "v1", "hot": "v1", "plain": "v1", "likeliest": "base", "other": "v2"}
    requests = [request(name, tokens, version=versions[name], num_samples=2, max_tokens=9, temperature=t) for name, t in temperatures.items()]
    for (name, _), events in drawn(model, adapters, requests, limits).items():
        sequence, weights = [*tokens, *(event.token for event in events)], adapters.get(versions[name])
        own = [event.logprob for event in events]
        assert own == trainers(model, sequence, weights, 1.0)[len(tokens) - 1 :].tolist()
        told = [event.processed_logprob for event in events]
        if temperatures[name] in (0.0, 1.0):
            assert told == [0.0 if temperatures[name] == 0 else None] * 9
        else:
            assert told == trainers(model, sequence, weights, temperatures[name])[len(tokens) - 1 :].tolist()
            assert told != own


def test_the_likeliest_at_a_temperature_are_told_in_the_same_numbers() -> None:
    model, tokens = made(torch.float32, False, None), prompt(9)
    (events,) = drawn(model, {}, [request("r", tokens, temperature=0.7, asked={"top_logprobs": VOCAB})], ROOMY).values()
    for event in events:
        assert dict(event.processed_top)[event.token] == event.processed_logprob
        # Shares of the whole, in float32.
        assert sum(np.exp(value) for _, value in event.processed_top) == pytest.approx(1, abs=1e-5)


def test_what_is_kept_of_a_draft_has_the_same_bits() -> None:
    model, tokens = made(torch.float32, False, None), prompt(9)
    plain = request("r", tokens, temperature=0.7, max_tokens=12)
    (expected,) = drawn(model, {}, [plain], ROOMY).values()
    draft = (*(event.token for event in expected[:7]), 0, 0)
    (found,) = drawn(model, {}, [request("r", tokens, temperature=0.7, max_tokens=12, asked={"drafts": (draft,)})], ROOMY).values()
    assert [event.kept for event in found][:7] == [True] * 7
    assert [(event.token, event.logprob, event.processed_logprob) for event in found] == [
        (event.token, event.logprob, event.processed_logprob) for event in expected
    ]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize(("dtype", "experts", "softcap"), FORMS)
def test_a_prompt_is_scored_at_a_temperature_with_the_trainers_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, experts: bool, softcap: float | None, limits: Limits, native: bool
) -> None:
    model, tokens = made(dtype, experts, softcap), prompt(130)
    if not native:
        leave_torch_alone(monkeypatch, model)
    adapters = {"v1": adapter(model, 1)}
    asked = {"prompt_logprobs": True, "prompt_top_k": 2, "prompt_ranks": True, "prompt_draws": 1}
    plain, tempered = (
        generate(sampler(model, adapters, limits), request("r", tokens, version="v1", max_tokens=0, asked=asked | more))["r"].score
        for more in ({}, {"scored_temperature": 0.7})
    )
    assert plain is not None
    assert tempered is not None
    found = tempered.logprobs.numpy()
    assert found[1:].tolist() == trainers(model, tokens, adapters["v1"], 0.7).tolist()
    assert plain.logprobs.numpy()[1:].tolist() == trainers(model, tokens, adapters["v1"], 1.0).tolist()
    # A temperature moves no token past another, nor what is drawn.
    for same in ("ranks", "top_ids", "drawn_ids"):
        assert np.array_equal(getattr(plain, same).numpy(), getattr(tempered, same).numpy())


def test_all_that_is_told_of_a_prompt_is_at_the_temperature() -> None:
    model, tokens = made(torch.float32, False, None), prompt(20)
    targets = {"targets": cells((3, 7), (3, tokens[3]), (19, 5))}
    asked = {"prompt_logprobs": True, "prompt_top_k": VOCAB, "prompt_draws": 2, "scored_temperature": 0.7, **targets}
    score = generate(sampler(model), request("r", tokens, max_tokens=0, asked=asked))["r"].score
    assert score is not None
    ids, values = score.top_ids.numpy().tolist(), score.top_logprobs.numpy().tolist()
    table = [dict(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    assert [row[token] for row, token in zip(table[1:], tokens[1:], strict=True)] == score.logprobs.numpy()[1:].tolist()
    assert score.target_logprobs.numpy().tolist() == [table[3][7], table[3][tokens[3]], table[19][5]]
    for row, drawn_k, logprobs_k in zip(table[1:], score.drawn_ids.numpy(), score.drawn_logprobs.numpy(), strict=True):
        assert [row[token] for token in drawn_k] == logprobs_k.tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.009, 101.0, float("nan"), float("inf")])
def test_a_temperature_that_nothing_can_be_scored_at_is_refused_by_name(temperature: float) -> None:
    asked = {"prompt_logprobs": True, "scored_temperature": temperature}
    answer = generate(sampler(decoder()), request("r", prompt(5), max_tokens=0, asked=asked))["r"]
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.field) == ("invalid", "scored_temperature")


def test_a_temperature_of_a_prompt_that_nothing_is_asked_of_is_refused() -> None:
    answer = generate(sampler(decoder()), request("r", prompt(5), asked={"scored_temperature": 0.7}))["r"]
    assert answer.failure is not None
    assert "of which nothing is asked" in answer.failure.message
