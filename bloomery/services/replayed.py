"""Whether an operation that was computed again came to the same.

What is compared is what the caller was told of the run's state. A newer release may tell more, or write weights in another form: that alone is no
other history.
"""

from collections.abc import Mapping

from bloomery.types.operations import CheckpointResult, Failed, ForwardBackwardResult, LoadResult, OptimStepResult, Result, SnapshotResult
from bloomery.types.wire import encode


def contradicts(told: Result, again: Result) -> bool:
    """Whether one happened and the other did not: then the run is not where its caller was told that it is, on whatever machine."""
    return isinstance(told, Failed) != isinstance(again, Failed)


def agree(told: Result, again: Result) -> bool:
    """Whether both speak of the same bits, as far as both speak of them."""
    match told, again:
        case Failed(), Failed():
            return True
        case ForwardBackwardResult(), ForwardBackwardResult():
            return _alike(told.metrics, again.metrics) and len(told.outputs) == len(again.outputs) and all(map(_alike, told.outputs, again.outputs))
        case OptimStepResult(), OptimStepResult():
            return _alike(told.metrics, again.metrics)
        case CheckpointResult() | LoadResult(), CheckpointResult() | LoadResult():
            return (told.digest, told.step) == (again.digest, again.step)
        case SnapshotResult(), SnapshotResult():
            # Version and key are hashes of files; what they are made from shows in the operations before.
            return told.step == again.step
        case _:
            return False


def _alike(told: Mapping[str, object], again: Mapping[str, object]) -> bool:
    # As bytes: a metric may be nan.
    return all(encode(told[name]) == encode(again[name]) for name in told.keys() & again.keys())
