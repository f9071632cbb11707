"""A writer, a reader or a sweeper in a process of its own, for tests that kill it: `python -m tests.sync.chain.worker publish STORE 6`.

STORE is a folder, or `ENDPOINT BUCKET` in one argument.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bloomery.obs.failpoints import failpoint
from bloomery.store.objects import BucketAccess, Folder, open_bucket
from bloomery.sync.chain.download import FetchConfig
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.sync.chain.receiver import ReceiveConfig, Receiver
from bloomery.sync.chain.retention import RetainConfig, sweep
from bloomery.sync.codec.layout import Chunk, Layout
from bloomery.sync.state_hash import Bits
from bloomery.types.objects import Objects
from tests.sync.chain.models import RUN, in_files, version

PUBLISH = PublishConfig(base_every=3, base_share=1e9)
RECEIVE = ReceiveConfig(fetch=FetchConfig(range_bytes=1000, at_once=2), scrub_share=1, name="reader")
NO_GRACE = RetainConfig(bases=1, grace_s=0, reader_s=0)


class Halves:
    """Weights that a process may die within a write of."""

    def __init__(self, folder: Path) -> None:
        self.inner = in_files(folder)
        self.layout: Layout = self.inner.layout

    def read(self, chunk: Chunk) -> Bits:
        return self.inner.read(chunk)

    def write(self, chunk: Chunk, indices: NDArray[np.uint32], values: Bits) -> None:
        half = len(indices) // 2
        self.inner.write(chunk, indices[:half], values[:half])
        failpoint("tests.weights.half")
        self.inner.write(chunk, indices[half:], values[half:])


def publish(objects: Objects, upto: int) -> None:
    """Versions up to this one, the newest that is there once more: its writer may not have heard that it is."""
    with Publisher.open(objects, RUN, holder="trainer", config=PUBLISH) as publisher:
        newest = publisher.newest
        for number in range(newest.manifest.sequence if newest else 0, upto + 1):
            done = publisher.publish(version(number - 1) if number else None, version(number))
            assert done.sequence == number


def receive(objects: Objects, folder: Path, upto: int) -> None:
    """Follow the chain to this version, step by step, with a step back at the end."""
    with Receiver.open(objects, Halves(folder / "weights"), RUN, folder=folder, config=RECEIVE) as receiver:
        if receiver.sequence is None:
            receiver.join(0)
        for number in range((receiver.sequence or 0) + 1, upto + 1):
            receiver.stage(number)
            receiver.flip()
            receiver.scrub()
            if number == upto:
                receiver.roll_back()
                receiver.stage(number)
                receiver.flip()


def retain(objects: Objects) -> None:
    """Sweep until nothing is left to do."""
    with Publisher.open(objects, RUN, holder="sweeper", config=PublishConfig(term_s=0.05)) as publisher:
        while any(sweep(objects, publisher.lease, trusted=(), config=NO_GRACE)):
            pass


def bury(objects: Objects) -> None:
    """One round, in which nothing has been dead for long enough."""
    with Publisher.open(objects, RUN, holder="trainer") as publisher:
        sweep(objects, publisher.lease, trusted=())


def opened(store: str) -> Objects:
    """What a test named."""
    if " " not in store:
        return Folder(Path(store))
    endpoint, bucket = store.split()
    return open_bucket(BucketAccess(bucket, prefix="chain", endpoint=endpoint, key_id="tests", secret="tests"))


def main() -> None:
    """The process."""
    verb, store, *rest = sys.argv[1:]
    match verb, rest:
        case "publish", [upto]:
            publish(opened(store), int(upto))
        case "receive", [folder, upto]:
            receive(opened(store), Path(folder), int(upto))
        case "sweep", []:
            retain(opened(store))
        case "bury", []:
            bury(opened(store))
        case _:
            raise SystemExit(f"there is no {verb} of {len(rest)} arguments")


if __name__ == "__main__":
    main()
