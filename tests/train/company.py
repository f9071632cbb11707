"""Random company: runs of every kind with operations of every kind that the door lets in, and what each gets of a pass.

Losses, trained parts, ranks and the lengths at which kernels change are dealt, so that all come up among `EVERY_KIND` runs; all else is drawn. What
data say of routing is drawn apart, so that a company is the same for models with experts and without.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from bloomery.models.decoder import Decoder
from bloomery.services.engines.models import Size
from bloomery.train.passes import Share, compute, goes_with
from bloomery.train.run import TrainableRun
from bloomery.types.arrays import Array
from bloomery.types.checks import check_forward_backward
from bloomery.types.custom_loss import LOGPROBS, Call, CustomInput, CustomLoss, Ref
from bloomery.types.losses import CUSTOM, LOSSES, LossForm, Option
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult, LoraSpec, Result, RunSpec
from bloomery.types.routing import RoutingShape
from bloomery.types.wire import encode
from tests.train.builders import BASE_HASH, VOCAB, MemoryShelf, datum

DEALT_LOSSES = (*LOSSES, *["cross_entropy", CUSTOM] * 2)
"""Those that take soft targets more often, so that several runs have as many."""
RANKS = (1, 2, 3, 8, 16, 17, 33, 64, 128)
LEARNING_RANKS = (1, 8, 128)
DEALT_RANKS = (*((rank, True) for rank in LEARNING_RANKS), *((rank, False) for rank in RANKS if rank != 1))
"""Each with whether its run learns for certain, or as it is drawn."""
PARTS = tuple(parts for size in (1, 2, 3) for parts in itertools.combinations(("attn", "mlp", "unembed"), size))
LENGTHS = (1, 3, 4, 15, 17, 31, 64, 65, 100, 130)
BORDERS = (511, 512, 513, 767, 768, 769)
"""Around the lengths from which on attention is computed in blocks of another size; these learn, and share a pass."""
LONG = (500, 600, 900, *BORDERS)
EVERY_KIND = 16
"""Runs among which whatever is dealt comes up."""
WIDTHS = (1, 2, 5)
"""Of soft targets: few, so that runs meet others of the same width."""
BUDGETS = (64, 1024)
"""Several micro-batches of short sequences, or one."""
_Choice = TypeVar("_Choice")


class Outcome(NamedTuple):
    """All that an operation gives and leaves behind."""

    result: bytes
    gradients: torch.Tensor

    def equal(self, other: "Outcome") -> bool:
        """Whether every bit is the same."""
        return self.result == other.result and torch.equal(self.gradients, other.gradients)


class Tenant:
    """A run that has learned something already, and an operation of its own."""

    def __init__(self, model: Decoder, number: int, lora: LoraSpec, operation: ForwardBackward, *, budget: int = 1024) -> None:
        check_forward_backward(operation, Size(context=1024, vocab_size=VOCAB, width=64, routing=model.config.routing))
        spec = RunSpec(run_id=f"run-{number}", base_hash=BASE_HASH, lora=lora, micro_batch_tokens=budget)
        self.run = TrainableRun(model, spec, MemoryShelf())
        masters = self.run.weights.masters
        masters.add_(torch.randn(masters.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
        self.run.weights.refresh()
        self.operation = operation

    def outcome(self, result: Result) -> Outcome:
        """Of the operation that gave this result; the run is then as it was before."""
        assert isinstance(result, ForwardBackwardResult), result
        gradients = self.run.weights.gradients.clone()
        self.run.weights.clear_gradients()
        return Outcome(encode(result), gradients)


class Compared(NamedTuple):
    """A company beside each of its runs alone."""

    apart: list[str]
    """Who has other bits in company."""
    learned: list[bool]
    """Which of the runs have gradients."""
    teams: list[list[Share]]
    """The passes of the company."""


def together(tenants: Sequence[Tenant], teams: list[list[Share]] | None = None) -> list[Outcome]:
    """What each gets where whatever may share a pass does; the passes are added to `teams`."""
    works = [tenant.run.execute(tenant.operation) for tenant in tenants]
    shares, results = {number: next(work) for number, work in enumerate(works)}, {}
    while shares:
        first = next(iter(shares.values()))
        team = {number: share for number, share in shares.items() if goes_with(first, share)}
        if teams is not None:
            teams.append(list(team.values()))
        for number, computed in zip(team, compute(list(team.values())), strict=True):
            # What comes next waits behind the others, as in the engine.
            del shares[number]
            try:
                shares[number] = works[number].send(computed)
            except StopIteration as done:
                results[number] = done.value
    return [tenant.outcome(results[number]) for number, tenant in enumerate(tenants)]


def compared(tenants: Sequence[Tenant]) -> Compared:
    """All of them in company, then each alone."""
    teams: list[list[Share]] = []
    company = together(tenants, teams)
    others = [tenant.run.spec.run_id for tenant, outcome in zip(tenants, company, strict=True) if not outcome.equal(together([tenant])[0])]
    return Compared(others, [bool(outcome.gradients.any()) for outcome in company], teams)


def apart(tenants: Sequence[Tenant]) -> list[str]:
    """Who has other bits in company than alone."""
    return compared(tenants).apart


def random_company(model: Decoder, *, count: int, seed: int) -> list[Tenant]:
    """So many tenants."""
    chance = random.Random(seed)
    losses, parts, ranks = _dealt(DEALT_LOSSES, chance), _dealt(PARTS, chance), _dealt(DEALT_RANKS, chance)
    borders = _dealt((*BORDERS, *[None] * (EVERY_KIND - len(BORDERS))), chance)
    tenants = []
    for number, border in enumerate(itertools.islice(borders, count)):
        # A run that trains all of its model has company nowhere.
        rank, learns = (0, False) if border is None and chance.random() < 0.2 else next(ranks)
        trained = next(parts)
        spec = LoraSpec(rank=rank, seed=number, **{f"train_{part}": part in trained for part in ("attn", "mlp", "unembed")})
        operation = random_operation(chance, number, next(losses), model.config.routing, border=border, learns=learns or border is not None)
        tenants.append(Tenant(model, number, spec, operation, budget=chance.choice(BUDGETS)))
    return tenants


def random_operation(
    chance: random.Random, number: int, loss: str, routing: RoutingShape | None, *, border: int | None, learns: bool
) -> ForwardBackward:
    """A batch, of which one datum is as long as the border, and what is asked of it: at least gradients where it learns."""
    noise, routed, form = np.random.default_rng(number), np.random.default_rng(chance.getrandbits(32)), LOSSES.get(loss)
    widths = WIDTHS if (form is None or form.soft_targets) and chance.random() < 0.7 else None
    lengths = _lengths(chance) if border is None else [border, *chance.sample(LENGTHS, chance.randint(0, 1))]
    data = [_example(noise, length, form, None if widths is None else chance.choice(widths), learns=learns) for length in lengths]
    if routing is not None:
        data = [_routed(routed, example, routing) if routed.random() < 0.5 else example for example in data]
    told = routing is not None and routed.random() < 0.4
    return ForwardBackward(
        loss=loss,
        loss_config={}
        if form is None
        else {name: _within(noise, option, ()).item() for name, option in form.options.items() if noise.random() < 0.5},
        data=tuple(data),
        backward=learns or chance.random() < 0.5,
        return_routing=told,
        return_routing_weights=told and routed.random() < 0.5,
        return_logprobs=form is None or chance.random() < 0.8,
        custom=_custom(1 if widths is None else 2) if form is None else None,
    )


def _dealt(choices: Sequence[_Choice], chance: random.Random) -> Iterator[_Choice]:
    while True:
        yield from chance.sample(choices, len(choices))


def _lengths(chance: random.Random) -> list[int]:
    kind = chance.random()
    if kind < 0.15:
        return [chance.choice(LONG)]
    if kind < 0.4:
        # So few rows that a product alone takes another kernel than in company, were they not padded.
        return [chance.randint(1, 3)]
    return [chance.choice(LENGTHS) for _ in range(chance.randint(1, 3))]


def _example(noise: np.random.Generator, length: int, form: LossForm | None, width: int | None, *, learns: bool) -> Datum:
    """A datum with a prompt without loss (the first third); unless it `learns`, one in ten has none anywhere. `form` None: of the custom loss."""
    shape = (length,) if width is None else (length, width)
    factors = noise.normal(0.3, 1.0, shape)
    factors[: length if noise.random() < 0.1 and not learns else length // 3] = 0
    if form is None:
        inputs = {"sampled": noise.normal(-6, 1, shape), "factors": factors}
    else:
        inputs = {form.factor: factors} | {name: noise.normal(-6, 1, shape) for name in form.inputs if name != form.factor}
        optional = [name for name in form.optional if noise.random() < 0.3]
        inputs |= {name: (factors != 0) | (noise.random(shape) < 0.3) for name in optional if name in form.masks}
        inputs |= {name: _within(noise, form.options[name], shape) for name in optional if name in form.options}
    return datum(noise.integers(0, VOCAB, length), noise.integers(0, VOCAB, shape), **inputs)


def _within(noise: np.random.Generator, option: Option, shape: tuple[int, ...]) -> np.ndarray:
    """Values of an option, near enough to its default that it matters."""
    return np.float32(noise.uniform(option.least, min(option.most, option.default * 1.5), shape))


def _routed(noise: np.random.Generator, example: Datum, shape: RoutingShape) -> Datum:
    """The datum with experts for most of its tokens, half of the time weighed."""
    places = (example.tokens.shape[0], len(shape.sparse_layers))
    chosen = noise.random((*places, shape.experts)).argsort(-1)[..., : shape.top_k]
    free = noise.random((*places, 1)) < 0.2
    weights = np.where(free, 0, noise.uniform(0, 1.5, (*places, shape.top_k))).astype(np.float32)
    routing = Array.of(np.where(free, -1, chosen).astype(np.int32))
    return msgspec.structs.replace(example, routing=routing, routing_weights=Array.of(weights) if noise.random() < 0.5 else None)


def _custom(rank: int) -> CustomLoss:
    """Importance sampling, as a caller's own graph."""
    calls = (
        Call("log_ratio", "sub", {"input": Ref(0), "other": Ref(1)}),
        Call("ratio", "exp", {"input": Ref(3)}),
        Call("weighted", "mul", {"input": Ref(4), "other": Ref(2)}),
        Call("gain", "sum", {"input": Ref(5)}),
        Call("loss", "neg", {"input": Ref(6)}),
        Call("mean", "mean", {"input": Ref(4)}),
    )
    inputs = tuple(CustomInput(name, rank) for name in (LOGPROBS, "sampled", "factors"))
    return CustomLoss("of-mine", inputs, calls, loss=7, metrics={"custom/ratio:mean": 8})
