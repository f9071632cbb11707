"""Custom losses: the graph of one datum evaluated by a small interpreter, and its gradient with respect to the log-probabilities.

Everything happens on the host, in time and memory that grow with the number of elements alone: no operator is worse than linear, and how large a
value can be is known before it is made. Shapes: T predictions, K soft targets per prediction.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bloomery.train.losses import Loss, cross_entropy
from bloomery.types.arrays import Array
from bloomery.types.custom_loss import LOGPROBS, MAX_WHOLE, Argument, CustomLoss, Items, Ref, Rest, Slice
from bloomery.types.errors import InvalidInput
from bloomery.types.losses import TARGETS, LossForm
from bloomery.types.operations import Datum

MAX_ELEMENTS: Final = 1 << 24
"""Of all values of a datum's graph together."""
MAX_ELEMENTS_TOGETHER: Final = 1 << 26
"""Of those of a micro-batch, whose graphs are evaluated in one turn of the engine: well under a second."""
WEIGHTS: Final = "weights"
WEIGHTED: Final = Loss(form=LossForm(factor=WEIGHTS, inputs=(WEIGHTS,), soft_targets=True), options={}, kernel=cross_entropy)
"""What a pass computes for a custom loss: a sum of log-probabilities with signed weights, whose gradient is that of the loss where the weights are
its derivatives, negated."""

Value = Tensor | float | int | torch.Size
_WRONG: Final = (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError)
"""What torch and Python raise where shapes, dtypes or numbers do not fit an operator."""


class Outcome(NamedTuple):
    """Of one datum."""

    loss: float
    metrics: Mapping[str, float]
    slope: np.ndarray
    """d loss / d log-probability, float32 in the shape of the targets; 0 where it was not asked for."""


def weighted(datum: Datum, weights: np.ndarray | None = None) -> Datum:
    """The datum as `WEIGHTED` takes it; without weights all are 0."""
    targets = datum.inputs[TARGETS]
    given = np.zeros(targets.shape, np.float32) if weights is None else weights
    return msgspec.structs.replace(datum, inputs={TARGETS: targets, WEIGHTS: Array.of(given)})


class Room:
    """How many elements the graphs of a micro-batch may still have."""

    def __init__(self) -> None:
        self.left = MAX_ELEMENTS_TOGETHER


def evaluate(loss: CustomLoss, datum: Datum, logprobs: np.ndarray, where: str, *, gradient: bool, room: Room | None = None) -> Outcome:
    """The loss of one datum, called `where` in errors; what goes wrong is the caller's doing. `room` is shared by those of a micro-batch."""
    inputs = _inputs(loss, datum, logprobs)
    with torch.enable_grad():
        inputs[0].requires_grad_(gradient)
        values = _values(loss, inputs, where, room or Room())
        total = _scalar(values[loss.loss], f"{where}: the loss of `{loss.name}`")
        if not math.isfinite(total.item()):
            raise InvalidInput(f"{where}: the loss of `{loss.name}` is {total.item()}; check this datum's inputs, then the loss")
        slope = _gradient(total, inputs[0], f"{where}: the loss of `{loss.name}`") if gradient else np.zeros(logprobs.shape, np.float32)
    metrics = {name: _scalar(values[number], f"{where}: metric `{name}`").item() for name, number in loss.metrics.items()}
    return Outcome(total.item(), {name: float(value) for name, value in metrics.items()}, slope)


def totals(loss: CustomLoss, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics of an operation: sums over its data, and means where a name says so."""
    found = {"loss:sum": float(np.sum([outcome.loss for outcome in outcomes]))}
    for name in loss.metrics:
        values = [outcome.metrics[name] for outcome in outcomes]
        found[name] = float(np.mean(values) if name.endswith(":mean") else np.sum(values))
    return found


def _inputs(loss: CustomLoss, datum: Datum, logprobs: np.ndarray) -> list[Tensor]:
    found = {LOGPROBS: logprobs} | {given.name: datum.inputs[given.name].numpy() for given in loss.inputs if given.name != LOGPROBS}
    # A copy: what an array of the wire holds cannot be written.
    tensors = [torch.from_numpy(found[given.name].copy()) for given in loss.inputs]
    return [tensor.reshape(()) if given.rank == 0 else tensor for tensor, given in zip(tensors, loss.inputs, strict=True)]


def _scalar(value: Value, what: str) -> Tensor:
    assert isinstance(value, Tensor)
    if value.ndim != 0:
        raise InvalidInput(f"{what} has shape {list(value.shape)}: it must be a scalar, as `sum()` or `mean()` give")
    return value


def _gradient(total: Tensor, logprobs: Tensor, what: str) -> np.ndarray:
    if not total.requires_grad:
        how = "compute it from them without `detach`, and not by comparing or rounding alone"
        raise InvalidInput(f"{what} does not depend on `{LOGPROBS}` in a way that has a gradient: {how}")
    try:
        (slope,) = torch.autograd.grad(total, logprobs)
    except _WRONG as error:
        raise InvalidInput(f"{what} has no gradient: {_gist(error)}") from error
    if not torch.isfinite(slope).all():
        raise InvalidInput(f"{what} has a gradient that is not finite; replace values before `exp`, `log` or `sqrt`, as with `torch.where`")
    return slope.numpy()


def _values(loss: CustomLoss, inputs: Sequence[Tensor], where: str, room: Room) -> list[Value]:
    """Of all inputs and calls."""
    values: list[Value] = list(inputs)
    own = MAX_ELEMENTS
    for call in loss.calls:
        what = f"{where}: loss `{loss.name:.64}`, node `{call.name:.64}` ({call.operator})"
        arguments = {name: _resolved(argument, values) for name, argument in call.arguments.items()}
        try:
            elements = _most_elements(call.operator, arguments)
            own, room.left = own - elements, room.left - elements
            if own < 0:
                raise InvalidInput(f"{what}: the values of the loss have more than {MAX_ELEMENTS} elements: send shorter sequences or simplify it")
            if room.left < 0:
                more = f"the values of the loss for the data of one pass have more than {MAX_ELEMENTS_TOGETHER} elements"
                raise InvalidInput(f"{what}: {more}: send fewer data at a time or simplify it")
            values.append(KERNELS[call.operator](**{name: given for name, given in arguments.items() if given is not None or name == "index"}))
        except _WRONG as error:
            raise InvalidInput(f"{what}: {_gist(error)}") from error
    return values


def _most_elements(name: str, arguments: Mapping[str, Any]) -> int:
    """No less than the result will have, before there is one."""
    if name in ("stack", "cat"):
        return sum(tensor.numel() for tensor in arguments["tensors"])
    shapes = [tuple(value.shape) for value in arguments.values() if isinstance(value, Tensor)]
    if name == "expand":
        shapes.append(tuple(int(size) for size in arguments["size"]))
    # Of shapes that are aligned at their last dimensions, as broadcasting does.
    # An empty dimension counts as 1: what reduces it away is as large as the others.
    return math.prod(max(1, *sides) for sides in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1))


def _gist(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _resolved(argument: Argument, values: Sequence[Value]) -> Any:
    match argument:
        case Ref(number):
            return values[number]
        case Items(items):
            return tuple(_resolved(item, values) for item in items)
        case Slice(start, stop, step):
            return slice(*(_resolved(part, values) for part in (start, stop, step)))
        case Rest():
            return Ellipsis
        case _:
            return argument


def _arithmetic(compute: Callable[[Any, Any], Any], of_numbers: Callable[[Any, Any], Any] | None = None) -> Callable[..., Value]:
    """An operator on tensors and numbers; numbers alone stay so small that no chain of them takes time or memory."""

    def kernel(input: Value, other: Value) -> Value:
        if isinstance(input, Tensor) or isinstance(other, Tensor):
            found: Value = compute(input, other)
            return found
        return _bounded((of_numbers or compute)(input, other))

    return kernel


def _bounded(number: Any) -> float | int:
    if isinstance(number, int) and abs(number) > MAX_WHOLE:
        raise OverflowError(f"a whole number above {MAX_WHOLE}")
    if not isinstance(number, int | float):
        raise TypeError(f"it gives {type(number).__name__}")
    return number


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def kernel(input: Value, other: Value) -> Tensor:
        if not (isinstance(input, Tensor) or isinstance(other, Tensor)):
            raise TypeError("two numbers are not compared: one side must be a tensor")
        found: Tensor = compare(input, other)
        return found

    return kernel


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda input: input.to(dtype)


def _cast(input: Tensor, dtype: str) -> Tensor:
    return input.to(_DTYPES[dtype])


def _typed(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the name of a dtype for it."""

    def kernel(input: Tensor, dtype: str | None = None, _stacklevel: int = 0, **options: Any) -> Tensor:
        return compute(input if dtype is None else input.to(_DTYPES[dtype]), **options)

    return kernel


def _min_max(all_of: Callable[[Tensor], Tensor], of_two: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda input, other=None: all_of(input) if other is None else of_two(input, other)


def _expanded(input: Tensor, size: Sequence[int]) -> Tensor:
    new = len(size) - input.dim()
    if any(side < -1 or (side == -1 and index < new) for index, side in enumerate(size)):
        raise ValueError(f"sizes {tuple(size)}: a size is 0 or more, or -1 for a dimension that is there")
    return input.expand(size)


def _item(input: Any, index: Any) -> Any:
    return input[index]


def _reduced(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the parameters that are only taken as unset."""
    unset = ("size_average", "reduce", "inplace", "weight", "pos_weight")
    return lambda input, **options: compute(
        input, **{name: value for name, value in options.items() if name not in unset or isinstance(value, Tensor)}
    )


_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_TORCH: Final = (
    "exp expm1 log log1p log2 sqrt rsqrt square reciprocal sign sigmoid tanh erf sin cos isnan isinf isfinite floor ceil detach clone logical_not"
    " zeros_like ones_like t count_nonzero maximum minimum logical_and logical_or logical_xor logaddexp clamp clamp_min clamp_max masked_fill"
    " full_like amax amin logsumexp var std any all reshape permute flatten squeeze unsqueeze transpose narrow gather tril triu stack cat"
)
_FUNCTIONAL: Final = "logsigmoid softplus relu silu elu leaky_relu mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits"
KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: _reduced(getattr(functional, name)) for name in _FUNCTIONAL.split()},
    **{name: _typed(getattr(torch, name)) for name in ("sum", "mean", "cumsum", "softmax", "log_softmax")},
    **{name: _arithmetic(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv", "mod")},
    **{name: _compared(getattr(operator, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne", "xor")},
    "div": _arithmetic(operator.truediv),
    "pow": _arithmetic(operator.pow, math.pow),
    "and": _compared(operator.and_),
    "or": _compared(operator.or_),
    "invert": torch.bitwise_not,
    "neg": lambda input: operator.neg(input),
    "abs": lambda input: abs(input),
    "dot": lambda input, other: torch.dot(input, other),
    "where": lambda condition, input, other: torch.where(condition, input, other),
    "expand_as": lambda input, other: input.expand_as(other),
    "type_as": lambda input, other: input.type_as(other),
    "max": _min_max(torch.max, torch.maximum),
    "min": _min_max(torch.min, torch.minimum),
    "math.sqrt": lambda input: math.sqrt(input),
    "math.log": lambda input: math.log(input),
    "math.exp": lambda input: math.exp(input),
    "contiguous": lambda input: input.contiguous(),
    "bool": _to(torch.bool),
    "float": _to(torch.float32),
    "double": _to(torch.float64),
    "long": _to(torch.int64),
    "to": _cast,
    "view": torch.reshape,
    "expand": lambda input, size: _expanded(input, size),
    "shape": lambda input: input.shape,
    "size": lambda input, dim: input.shape[dim],
    "ndim": lambda input: input.ndim,
    "numel": lambda input: input.numel(),
    "getitem": _item,
}
"""One for each operator of `types/custom_loss.py`, whose arguments the door has checked."""
