"""Runs that train all parameters: what trains, against `transformers`, and that nothing else moves."""

import dataclasses

import numpy as np
import pytest
import torch

from bloomery.models.decoder import Decoder
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.obs.machine import free_memory_bytes
from bloomery.train import snapshot
from bloomery.train.full import FullParameters, count_parts, part_of
from bloomery.train.passes import compute, goes_with
from bloomery.train.run import TrainableRun
from bloomery.types.errors import InvalidInput
from bloomery.types.footprint import full_run_bytes
from bloomery.types.operations import LoraSpec, SnapshotResult
from tests.infer.builders import full_logprobs
from tests.models.builders import reference, saved
from tests.train import builders
from tests.train.builders import finish, gradients, learn, logprobs, relative_difference, step, supervised, train

LENGTHS = [5, 37, 64, 130]
DATA = supervised(LENGTHS, seed=2)
PARTS = ("attn", "mlp", "unembed")


def full(model: Decoder, shelf: builders.MemoryShelf | None = None, **lora: object) -> TrainableRun:
    return builders.run(model, shelf, rank=0, **lora)


def only(part: str) -> dict[str, bool]:
    return {f"train_{name}": name == part for name in PARTS}


def values(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in decoder.named_parameters()}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return builders.decoder()


def test_every_parameter_trains_and_the_base_model_stays(model):
    before = values(model)
    trained = full(model)
    results = train(trained, [learn(DATA), step(3e-3)] * 3)
    assert results[4].metrics["loss:sum"] < results[0].metrics["loss:sum"]
    after = values(trained.weights.decoder)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], tensor) for name, tensor in values(model).items())


def test_a_fresh_run_gives_the_bits_of_the_base_model(model):
    fresh = logprobs(finish(full(model), learn(DATA, backward=False)))
    adapter = logprobs(finish(builders.run(model), learn(DATA, backward=False)))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(fresh, adapter, strict=True))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("experts", [False, True])
def test_a_part_trains_alone_and_the_others_are_the_base_models_own(part, experts):
    base = builders.decoder(experts=experts)
    before = values(base)
    trained = full(base, **only(part))
    train(trained, [learn(DATA), step()] * 2)
    own = dict(trained.weights.decoder.named_parameters())
    changed = {name for name, tensor in own.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if part_of(name) == part}
    shared = {name for name, tensor in base.named_parameters() if own[name].data_ptr() == tensor.data_ptr()}
    assert shared == before.keys() - changed
    assert dict(trained.weights.named(trained.weights.masters)).keys() == changed


def test_every_tensor_is_of_one_part(model):
    counts = count_parts(builders.decoder(experts=True))
    assert counts.keys() == set(PARTS)
    assert sum(count_parts(model).values()) == sum(tensor.numel() for tensor in model.parameters())


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_gradients_equal_those_of_transformers(family, tmp_path):
    trained = full(load_decoder(saved(family, tmp_path), dtype=torch.float32))
    finish(trained, learn(DATA))
    theirs = reference(family)
    losses = []
    for example in DATA:
        tokens, targets = (torch.tensor(array.numpy().astype(np.int64)) for array in (example.tokens, example.inputs["target_tokens"]))
        scored = theirs(tokens[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        losses.append(-scored * torch.from_numpy(example.inputs["weights"].numpy().copy()))
    torch.cat(losses).sum().backward()
    ours = _stored_gradients(trained)
    expected = _their_gradients(theirs)
    assert ours.keys() == expected.keys()
    # float32 gradients of a sum over two hundred tokens, relative to each tensor's norm.
    assert relative_difference(ours, expected) < 2e-5


def _stored_gradients(trained: TrainableRun) -> dict[str, torch.Tensor]:
    """Gradients under the names of a saved model."""
    holder = Decoder(trained.weights.decoder.config, dtype=torch.float32).requires_grad_(False)
    holder.load_state_dict(gradients(trained))
    return stored_tensors(holder)


def _their_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As `save_pretrained` would name them: expert by expert."""
    found = {}
    for name, parameter in model.named_parameters():
        head, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True) if leaf == "gate_up_proj" else [("down_proj", gradient)]
            found |= {f"{head}.{expert}.{projection}.weight": part for projection, part in parts}
    return found


def test_gradients_of_several_micro_batches_add_up_to_those_of_one(model):
    together, apart = full(model), full(model, budget=70)
    finish(together, learn(DATA))
    finish(apart, learn(DATA))
    # Another order of float32 summation.
    assert relative_difference(gradients(apart), gradients(together)) < 1e-5


def test_in_fp32_the_forward_computes_with_the_masters_themselves(model):
    trained = full(model)
    for name, master in trained.weights.named(trained.weights.masters):
        assert dict(trained.weights.decoder.named_parameters())[name].data_ptr() == master.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_computes_with_what_the_snapshot_holds(dtype):
    base = builders.decoder(dtype=dtype)
    trained = full(base)
    train(trained, [learn(DATA), step(1e-3)] * 3)
    assert trained.weights.masters.dtype == trained.weights.gradients.dtype == torch.float32
    copies = dict(trained.weights.decoder.named_parameters())
    assert all(torch.equal(copies[name], master.to(dtype)) for name, master in trained.weights.named(trained.weights.masters))
    published = snapshot.read_model(trained.snapshot("t").data, base)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in published.named_parameters())


@pytest.mark.parametrize(("dtype", "experts"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_the_published_model_gives_the_trainers_bits(dtype, experts):
    base, shelf = builders.decoder(dtype=dtype, experts=experts), builders.MemoryShelf()
    trained = full(base, shelf)
    published = train(trained, [learn(DATA), step(1e-3), builders.SAVE])[-1]
    assert isinstance(published, SnapshotResult)
    served = snapshot.read_model(shelf.blobs[published.key], base)
    own = logprobs(finish(trained, learn(builders.following(LENGTHS, seed=9), backward=False)))
    for example, ours in zip(builders.following(LENGTHS, seed=9), own, strict=True):
        tokens = [*example.tokens.numpy().tolist(), int(example.inputs["target_tokens"].numpy()[-1])]
        assert np.array_equal(full_logprobs(served, tokens, None), ours)


def test_views_begin_at_cache_lines_and_what_lies_between_stays_zero():
    # Odd sizes: a norm of 60 and matrices of 60 x 301 do not end where a cache line does.
    config = dataclasses.replace(builders.decoder().config, hidden_size=60, vocab_size=301)
    base = Decoder(config, dtype=torch.float32).requires_grad_(False)
    for tensor in base.parameters():
        tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(tensor.numel()))
    trained = full(base)
    train(trained, [learn(DATA), step(weight_decay=0.1)] * 2)
    weights = trained.weights
    assert all(view.data_ptr() % 64 == 0 for _, view in weights.named(weights.masters))
    used = torch.zeros_like(weights.masters, dtype=torch.bool)
    for _, view in weights.named(used):
        view.fill_(True)
    assert not weights.masters[~used].any()


def test_a_pass_never_holds_two_decoders(model):
    adapter, one, two = builders.run(model), full(model), full(model)
    shares = [next(run.execute(learn(supervised([9])))) for run in (adapter, one, two)]
    assert not any(goes_with(left, right) for left in shares for right in shares if left is not right)


def test_a_pass_that_is_computed_again_adds_no_gradient_twice(model):
    once, twice = full(model), full(model)
    finish(once, learn(supervised([9])))
    share = next(twice.execute(learn(supervised([9]))))
    compute([share])
    compute([share])
    twice.weights.gather_gradients()
    assert torch.equal(twice.weights.gradients, once.weights.gradients)


def test_what_does_not_fit_is_refused_before_anything_is_allocated(model):
    config = dataclasses.replace(model.config, vocab_size=1 << 40)
    huge = Decoder(config, dtype=torch.float32, device="meta")
    parameters = sum(tensor.numel() for tensor in huge.parameters())
    needs = full_run_bytes(parameters)
    assert needs > free_memory_bytes()
    with pytest.raises(InvalidInput, match=rf"needs {needs} bytes of memory, \d+ are free") as caught:
        FullParameters(huge, LoraSpec(rank=0, seed=0))
    assert caught.value.field == "rank"
