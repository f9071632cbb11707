"""What an operation gives back of its data: outputs and metrics, from what its micro-batches gave."""

from collections.abc import Sequence

import numpy as np
import torch

from bloomery.train import batch
from bloomery.train.losses import Loss
from bloomery.train.passes import Computed
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult


def result_of(loss: Loss, operation: ForwardBackward, logprobs: list[np.ndarray]) -> ForwardBackwardResult:
    """Outputs and metrics, computed over the whole operation at once so that the micro-batches leave no trace in them."""
    flat = torch.from_numpy(np.concatenate([values.ravel() for values in logprobs]))
    rows = [batch.loss_inputs(datum, loss) for datum in operation.data]
    inputs = {name: torch.from_numpy(np.concatenate([row[name].ravel() for row in rows])) for name in rows[0]}
    ends = np.cumsum([values.size for values in logprobs])[:-1]
    sequence = torch.from_numpy(np.repeat(np.arange(len(logprobs)), [values.size for values in logprobs]))
    parts = np.split(loss.terms(flat, inputs, sequence).numpy(), ends)
    terms = [part.reshape(values.shape) for part, values in zip(parts, logprobs, strict=True)]
    sums = [float(np.sum(values, dtype=np.float64)) for values in terms]
    for index, value in enumerate(sums):
        if not np.isfinite(value):
            raise InvalidInput(f"data[{index}]: the loss is {value}; the gradients were cleared. Check this datum's inputs, then the learning rate")
    metrics = {"loss:sum": float(np.sum(sums))} | loss.metrics(flat, inputs, sequence)
    if not operation.return_logprobs:
        return ForwardBackwardResult(outputs=({},) * len(operation.data), metrics=metrics)
    outputs = [{"logprobs": Array.of(values)} for values in logprobs]
    if loss.form.term_output is not None:
        outputs = [output | {loss.form.term_output: Array.of(values)} for output, values in zip(outputs, terms, strict=True)]
    return ForwardBackwardResult(outputs=tuple(outputs), metrics=metrics)


def told_routing(computed: Computed, data: Sequence[Datum], operation: ForwardBackward) -> list[dict[str, Array]]:
    """Of each datum, what was asked of its routing."""
    told_RLT = {
        "routing": computed.routing_RLT if operation.return_routing else None,
        "routing_weights": computed.routing_weights_RLT if operation.return_routing_weights else None,
    }
    rows = {name: batch.unpack_rows(values_RLT, data) for name, values_RLT in told_RLT.items() if values_RLT is not None}
    return [{name: Array.of(parts[index]) for name, parts in rows.items()} for index in range(len(data))]


def with_routing(result: ForwardBackwardResult, routing: list[dict[str, Array]]) -> ForwardBackwardResult:
    """The same with what was told of each datum."""
    outputs = tuple(output | told for output, told in zip(result.outputs, routing, strict=True))
    return ForwardBackwardResult(outputs=outputs, metrics=result.metrics)
