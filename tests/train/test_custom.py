"""Custom losses in the engine: what torch computes from the traced function comes out, bit for bit; what cannot be computed is refused."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.loss_graphs import parse_custom_loss
from bloomery.models.decoder import Decoder
from bloomery.train.custom import Room, evaluate
from bloomery.train.operators import KERNELS
from bloomery.types.custom_loss import DTYPES, OPERATORS, REDUCTIONS, Call, CustomInput, CustomLoss, Items, Ref, Rest, Slice, check_custom_loss
from bloomery.types.errors import BloomeryError, InvalidInput
from bloomery.types.operations import Datum, Failed, ForwardBackward, ForwardBackwardResult, OptimStepResult
from tests.train import builders
from tests.train.builders import datum, finish, gradients, learn, relative_difference, step, supervised

RANKS = {"logprobs": 1, "a": 1, "b": 1, "s": 0}


def traced(function: Callable[..., Any], ranks: dict[str, int] | None = None) -> tuple[CustomLoss, torch.fx.GraphModule]:
    """A loss as the SDK would send it, and what the SDK would run itself."""
    handle = trace_loss(function, ranks or RANKS, "session")
    inputs = [given.model_dump() for given in handle.inputs]
    graph = encode_graph(handle).model_dump()
    asked = bodies.CreateCustomLoss(session_id="session", custom_loss_seq_id=0, name=handle.name, inputs=inputs, graph=graph)
    return parse_custom_loss(asked), handle.graph


def example(length: int = 6, width: int | None = None) -> tuple[Datum, np.ndarray]:
    """A datum and its log-probabilities."""
    noise = np.random.default_rng(1)
    shape = (length,) if width is None else (length, width)
    made = datum(np.arange(length), np.zeros(shape, np.int64), a=noise.normal(size=length), b=noise.uniform(0.1, 2, length), s=np.asarray(0.7))
    return made, -noise.uniform(0.1, 3, shape).astype(np.float32)


def of(value: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that sums up what the function gives."""

    def loss(logprobs: Any, a: Any, b: Any, s: Any) -> Any:
        found = value(logprobs, a, b, s)
        return (logprobs * b).sum() + found.float().sum(), {"custom/found:mean": found.float().mean()}

    return loss


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda p, a, b, s: ((p - a).exp() * a + 2 / b - (1 - p) ** 2) % 3 + -p + abs(p) + p.detach() // 2,
    "ppo": lambda p, a, b, s: -torch.minimum((p - a).exp() * b, torch.clamp((p - a).exp(), 0.8, 1.2) * b),
    "dpo": lambda p, a, b, s: -F.logsigmoid(s * (p.sum() - a.sum())),
    "pointwise": lambda p, a, b, s: torch.expm1(p) + b.log() + b.log1p() + b.log2() + b.sqrt() + b.rsqrt() + p.square() + b.reciprocal() + a.sign(),
    "curves": lambda p, a, b, s: p.sigmoid() + torch.tanh(p) + torch.erf(p) + p.sin() + p.cos() + a.floor() + a.ceil() + p.contiguous().clone(),
    "activations": lambda p, a, b, s: F.relu(p) + F.silu(p) + F.elu(p) + F.leaky_relu(p, 0.2) + F.softplus(p) + F.softplus(p, beta=2),
    "softmax": lambda p, a, b, s: F.softmax(p, dim=-1) + F.log_softmax(p, dim=0) + torch.log_softmax(p, 0, dtype=torch.float64) + p.softmax(0),
    "masks": lambda p, a, b, s: (
        torch.where((a > 0) & (b <= 1) | ~(a >= 0), p, 0.0) + p.masked_fill(a < 0, -1.0) + p.where(a != 0, b) + (a == b).long()
    ),
    "choices": lambda p, a, b, s: torch.where(a > 0, 1.0, p) + torch.where(b > 1, 1.0, -1.0) + torch.where(a > b, s, p),
    "logic": lambda p, a, b, s: torch.logical_and(a > 0, b > 1) ^ torch.logical_or(a < 0, b.bool()) | torch.logical_xor(a > 0, b > 1).logical_not(),
    "finite": lambda p, a, b, s: torch.isnan(a) | torch.isinf(a) | torch.isfinite(a) | (torch.zeros_like(a) > torch.ones_like(b)),
    "bounds": lambda p, a, b, s: (
        p.clamp(min=-1.0) + p.clamp_min(-1) + torch.clamp_max(p, -1) + torch.maximum(p, a) + torch.logaddexp(p, a) + torch.max(p, a)
    ),
    "reductions": lambda p, a, b, s: (
        p.mean() + p.sum(dim=0, keepdim=True) + p.amax(0) + p.amin() + torch.logsumexp(p, 0) + p.var() + p.std(unbiased=False)
    ),
    "extremes": lambda p, a, b, s: (
        p.max() + p.min() + (a > 0).any() + (a > 0).all(dim=0) + torch.count_nonzero(a) + torch.dot(p, a) + torch.full_like(a, 2.0)
    ),
    "sequences": lambda p, a, b, s: p.cumsum(0)[1:] + p[..., :-1] + p[None, 1:, None].squeeze() + p[0] + p[a.shape[0] - 1],
    "shapes": lambda p, a, b, s: (
        p.reshape(2, -1).t() + p.view((3, 2)) + p.view(2, 3).permute(1, 0) + p.view(2, 3).transpose(0, 1).flatten().view(3, 2)
    ),
    "wide": lambda p, a, b, s: (
        (p.unsqueeze(0) - p.unsqueeze(1)).tril().triu(diagonal=-2) + a.expand(6, -1) + a.expand_as(p[:, None] * a) + s.type_as(a)
    ),
    "joined": lambda p, a, b, s: (
        torch.cat([p, a]).narrow(0, 2, 6) + torch.stack((p, b), dim=1).sum(1) + p.gather(0, (b > 1).long()) + p.to(torch.float64)
    ),
    "sizes": lambda p, a, b, s: (
        p / p.shape[0] + p.double() / p.numel() + p * math.sqrt(p.size(0)) + p * math.log(p.ndim + 1) + p * math.exp(p.dim() - 1)
    ),
    "losses": lambda p, a, b, s: (
        F.mse_loss(p, a) + F.l1_loss(p, a, reduction="sum") + F.smooth_l1_loss(p, a, beta=0.5) + F.huber_loss(p, a, delta=0.5)
    ),
    "entropy": lambda p, a, b, s: F.binary_cross_entropy_with_logits(p, b.clamp(max=1.0), weight=b, reduction="none") + (-(p.exp() * p)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_comes_out_is_what_torch_computes(name: str) -> None:
    loss, graph = traced(of(FUNCTIONS[name]))
    made, logprobs = example()
    found = evaluate(loss, made, logprobs, "data[0]", gradient=True)
    own = torch.from_numpy(logprobs).requires_grad_()
    total, metrics = graph(own, *(torch.from_numpy(made.inputs[name].numpy().copy()) for name in ("a", "b", "s")))
    total.backward()
    assert (found.loss, found.metrics) == (total.item(), {name: value.item() for name, value in metrics.items()})
    assert np.array_equal(found.slope, own.grad.numpy())


def test_every_operator_is_computed_and_was_tried_above() -> None:
    assert KERNELS.keys() == OPERATORS.keys()
    tried = {call.operator for function in FUNCTIONS.values() for call in traced(of(function))[0].calls}
    assert OPERATORS.keys() - tried == set()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda p, a, b, s: p * a[:2], "node `mul` .mul.: RuntimeError: The size of tensor a"),
        (lambda p, a, b, s: p[99], "node `getitem` .getitem.: IndexError"),
        (lambda p, a, b, s: p.gather(0, (b * 1000).long()), "node `gather` .gather.: RuntimeError"),
        (lambda p, a, b, s: p.sum(1), "Dimension out of range"),
        (lambda p, a, b, s: p / (p.shape[0] - p.shape[0]), "the loss of `loss` is -inf"),
        (lambda p, a, b, s: p * (1 / (p.shape[0] - p.shape[0])), "ZeroDivisionError"),
        (lambda p, a, b, s: p * float("nan"), "data.7.: the loss of `loss` is nan"),
        (lambda p, a, b, s: (p - p.detach()).sqrt(), "gradient that is not finite"),
        (lambda p, a, b, s: p.expand(1 << 40, -1), "more than 16777216 elements"),
        (lambda p, a, b, s: p + p.narrow(0, 0, 0).unsqueeze(1).expand(0, 1 << 31).sum(), "more than 16777216 elements"),
        (lambda p, a, b, s: p + p.narrow(0, 0, 0).expand(-2, 0).sum(), "a size is 0 or more"),
        (lambda p, a, b, s: p + p.narrow(0, 0, 0).expand(-1, 0).sum(), "a size is 0 or more"),
        (
            lambda p, a, b, s: torch.stack([a[:, None, None, None, None] + a[:, None, None, None] + a[:, None, None] + a[:, None] + a] * 64)[
                None
            ].expand(100, -1, -1, -1, -1, -1, -1),
            "more than 16777216 elements",
        ),
        (lambda p, a, b, s: p * 2 ** p.shape[0] ** 99, "OverflowError|elements"),
        (lambda p, a, b, s: p * (p.shape[0] * (1 << 52)), "OverflowError: a whole number above"),
        (lambda p, a, b, s: p * (-(p.shape[0] ** 1)) ** (p.shape[0] / 5), "ValueError"),
    ],
)
def test_what_cannot_be_computed_is_the_callers_doing(function: Callable[..., Any], says: str) -> None:
    loss, _ = traced(of(function))
    with pytest.raises(InvalidInput, match=says):
        evaluate(loss, *example(), "data[7]", gradient=True)


def test_the_graphs_of_one_pass_share_their_room() -> None:
    loss, _ = traced(of(lambda p, a, b, s: p.expand(1 << 20, -1).sum() + p))
    room = Room()
    before = room.left
    evaluate(loss, *example(), "data[0]", gradient=True, room=room)
    used = before - room.left
    assert used > 1 << 20
    room.left = used - 1
    with pytest.raises(InvalidInput, match="for the data of one pass have more than 67108864 elements: send fewer data at a time"):
        evaluate(loss, *example(), "data[1]", gradient=True, room=room)


def test_a_loss_is_a_scalar_that_depends_on_the_logprobs() -> None:
    for function, says in (
        (lambda logprobs: (logprobs * 2, {}), "shape .6.: it must be a scalar"),
        (lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs}), "metric `custom/x:sum` has shape"),
        (lambda logprobs: (logprobs.detach().sum(), {}), "does not depend on `logprobs` .*: compute it from them without `detach`"),
        (lambda logprobs: ((logprobs // 2).sum(), {}), "has no gradient"),
    ):
        loss, _ = traced(function, {"logprobs": 1})
        with pytest.raises(InvalidInput, match=says):
            evaluate(loss, *example(), "data[0]", gradient=True)


NUMBERS = st.sampled_from([0, 1, -1, 2, 6, 1 << 40, 1 << 53, 0.5, math.inf, math.nan, True])
WHOLE = st.sampled_from([0, 1, -1, 2, 6, 1 << 40])


def argument(kind: str, values: int) -> st.SearchStrategy[Any]:
    """Something that an operator may take, of the values so far."""
    refs = st.integers(0, values - 1).map(lambda number: Ref(number=number))
    ends = st.none() | WHOLE | refs
    index = WHOLE | refs | st.none() | st.just(Rest()) | st.builds(Slice, start=ends, stop=ends, step=ends)

    def items(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Items]:
        return st.lists(inner, max_size=3).map(lambda found: Items(values=tuple(found)))

    kinds: dict[str, st.SearchStrategy[Any]] = {
        "number": NUMBERS | refs,
        "value": NUMBERS | refs,
        "int": WHOLE | refs,
        "dims": WHOLE | items(WHOLE),
        "sizes": refs | items(WHOLE | refs),
        "tensors": items(refs),
        "index": index | items(index),
        "flag": st.booleans(),
        "dtype": st.sampled_from(DTYPES),
        "word": st.sampled_from(REDUCTIONS),
        "unset": st.none(),
    }
    return kinds.get(kind, refs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.data())
def test_what_the_door_lets_in_is_computed_or_the_callers_mistake(data: st.DataObject) -> None:
    made, logprobs = example()
    inputs = tuple(CustomInput(name=name, rank=rank) for name, rank in RANKS.items())
    calls: list[Call] = []
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from(sorted(OPERATORS)))
        wanted = [parameter for parameter in OPERATORS[name].parameters if parameter.required or data.draw(st.booleans())]
        arguments = {parameter.name: data.draw(argument(parameter.kind, len(inputs) + len(calls))) for parameter in wanted}
        calls.append(Call(name=f"x{len(calls)}", operator=name, arguments=arguments))
        loss = CustomLoss(name="drawn", inputs=inputs, calls=tuple(calls), loss=len(inputs) + len(calls) - 1, metrics={})
        try:
            check_custom_loss(loss)
            found = evaluate(loss, made, logprobs, "data[0]", gradient=True)
            assert math.isfinite(found.loss)
            assert (found.slope.shape, found.slope.dtype) == (logprobs.shape, np.float32)
            assert np.isfinite(found.slope).all()
        except BloomeryError as error:
            if error.category != "user":
                raise
            if "it must be a scalar" not in error.message:
                calls.pop()


# In a run


def pulled(logprobs: Any, weights: Any) -> Any:
    """Sequence-level and not linear."""
    total = (logprobs * weights).sum()
    return F.softplus(-total / logprobs.shape[0]), {"custom/total:sum": total, "custom/total:mean": total}


PULLED, _ = traced(pulled, {"logprobs": 1, "weights": 1})
LENGTHS = [5, 37, 12, 64, 1, 130]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return builders.decoder()


def custom(data: tuple[Datum, ...], loss: CustomLoss = PULLED, *, backward: bool = True) -> ForwardBackward:
    return ForwardBackward(loss="custom", loss_config={}, data=data, backward=backward, custom=loss)


def test_gradients_are_those_of_the_way_over_the_client(model: Decoder) -> None:
    data = supervised(LENGTHS)
    here, there = builders.run(model, budget=64), builders.run(model, budget=64)
    result = finish(here, custom(data))
    assert isinstance(result, ForwardBackwardResult), result
    scored = builders.logprobs(finish(there, learn(data, backward=False)))
    total, weighted, sums = 0.0, [], []
    for one, values in zip(data, scored, strict=True):
        own = torch.from_numpy(values.copy()).requires_grad_()
        loss, metrics = pulled(own, torch.from_numpy(one.inputs["weights"].numpy().copy()))
        loss.backward()
        total += loss.item()
        sums.append(metrics["custom/total:sum"].item())
        weighted.append(datum(one.tokens.numpy(), one.inputs["target_tokens"].numpy(), weights=-own.grad.numpy()))
    finish(there, learn(tuple(weighted)))
    assert result.metrics == pytest.approx({"loss:sum": total, "custom/total:sum": sum(sums), "custom/total:mean": np.mean(sums)})
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(builders.logprobs(result), scored, strict=True))
    assert relative_difference(gradients(here), gradients(there)) < 1e-5


def test_soft_targets_have_a_gradient_each(model: Decoder) -> None:
    def distilled(logprobs: Any, weights: Any) -> Any:
        return -(weights * logprobs).sum(), {}

    loss, _ = traced(distilled, {"logprobs": 2, "weights": 2})
    noise = np.random.default_rng(3)
    data = tuple(datum(noise.integers(0, 300, n), noise.integers(0, 300, (n, 3)), weights=noise.normal(size=(n, 3))) for n in (4, 9))
    here, there = builders.run(model), builders.run(model)
    finish(here, custom(data, loss))
    finish(there, learn(data))
    assert relative_difference(gradients(here), gradients(there)) < 1e-5


def test_forward_alone_leaves_no_gradient_and_the_size_of_micro_batches_no_trace(model: Decoder) -> None:
    data = supervised(LENGTHS)
    trained = builders.run(model)
    whole = finish(trained, custom(data, backward=False))
    assert trained.at_rest
    assert whole == finish(builders.run(model, budget=16), custom(data))


def test_a_loss_that_fails_clears_the_gradients_and_the_run_goes_on(model: Decoder) -> None:
    def fragile(logprobs: Any, weights: Any) -> Any:
        return (logprobs * weights.sum().log()).sum(), {}

    loss, _ = traced(fragile, {"logprobs": 1, "weights": 1})
    good, bad = supervised([8]), supervised([8], weight=-1.0)
    trained = builders.run(model, budget=8)
    before = trained.weights_digest()
    failed = finish(trained, custom((*good, *bad), loss))
    assert isinstance(failed, Failed)
    assert (failed.category, "data[1]: the loss of `fragile` is nan" in failed.message) == ("user", True)
    refused = finish(trained, step())
    assert isinstance(refused, Failed)
    assert trained.weights_digest() == before
    finish(trained, custom(good))
    assert isinstance(finish(trained, step()), OptimStepResult)


def test_the_loss_travels_with_its_operation() -> None:
    odd = CustomLoss(
        name="odd",
        inputs=(CustomInput(name="logprobs", rank=1),),
        calls=(Call(name="x", operator="getitem", arguments={"input": Ref(number=0), "index": Slice(start=None, stop=2, step=None)}),),
        loss=1,
        metrics={},
    )
    operation = custom(supervised([3]), odd)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(operation), type=ForwardBackward) == operation
