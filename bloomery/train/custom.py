"""Custom losses: the graph of one datum evaluated by a small interpreter, and its gradient with respect to the log-probabilities.

Everything happens on the host, in time and memory that grow with the number of elements alone: no operator is worse than linear, and how large a
value can be is known before it is made. Shapes: T predictions, K soft targets per prediction.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from bloomery.train.losses import Loss, cross_entropy
from bloomery.train.operators import KERNELS, Value
from bloomery.types.arrays import Array
from bloomery.types.custom_loss import LOGPROBS, Argument, CustomLoss, Items, Ref, Rest, Slice
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
