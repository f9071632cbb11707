"""Reads what trackers were told of a job: `python -m tests.tracking.read_back TRACKER TARGET JOB`, where their packages are. Doubles are kept."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

Value = tuple[str, int, float]

_WANDB_HEADER: Final = 7
_BLOCK: Final = 32_768
_PIECE: Final = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def tensorboard(target: str, job: str) -> Iterator[Value]:
    """`target` is the directory of the job."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for file in sorted(Path(target).glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def mlflow(target: str, job: str) -> Iterator[Value]:
    """`target` is the URI of the store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=target)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`bloomery.job` = '{job}'")
    assert run.info.status == "FINISHED"
    assert run.data.params["method.kind"] == "sft"
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            yield name, metric.step, metric.value


def wandb(target: str, job: str) -> Iterator[Value]:
    """`target` is the directory with offline runs."""
    from wandb.proto import wandb_internal_pb2

    # The second session of a second has a directory with a number behind its name.
    for file in sorted(Path(target).glob(f"wandb/offline-run-*-{job}*/run-{job}.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if values:
                step = values.pop("step")
                yield from ((name, step, value) for name, value in values.items() if not name.startswith("_"))


def _records(log: bytes) -> Iterator[bytes]:
    """Of a file in the form of LevelDB's log behind a header of its own: pieces of records in blocks, each with checksum, length and kind."""
    place, record = _WANDB_HEADER, b""
    while place + _PIECE.size <= len(log):
        if _BLOCK - place % _BLOCK < _PIECE.size:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = _PIECE.unpack_from(log, place)
        place += _PIECE.size
        record += log[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def main() -> None:
    """Print them as JSON."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[sys.argv[1]](sys.argv[2], sys.argv[3]):
        found.setdefault(name, []).append((step, value))
    print(json.dumps({name: sorted(series, key=lambda place: place[0]) for name, series in found.items()}))


if __name__ == "__main__":
    main()
