"""The process of one job: `python -m bloomery.jobs.process`, which reads from its standard input what it works at and with which key.

How it ends tells its runner what to do: 0, the job's end was told to the server; anything else, somebody else is to go on.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from bloomery.client import Client
from bloomery.jobs import distilled, preferring, reinforced, supervised
from bloomery.jobs.guard import Guard
from bloomery.jobs.reporting import LeaseLost, Reporter, StandsStill, Steered
from bloomery.jobs.steering import steered, stopped
from bloomery.jobs.work import Work
from bloomery.obs import logs
from bloomery.recipes.failures import NothingCameBack
from bloomery.recipes.replay import NotKept
from bloomery.render import ChatTokenizer
from bloomery.types.errors import BloomeryError, Corrupt, reason, shown
from bloomery.types.jobs import JobResult
from bloomery.types.leases import MAX_REASON, FinishJob, Lease, Order

log = logging.getLogger(__name__)

PATIENCE_S: Final = 600.0
"""A server that starts again, or replays, is waited for."""
GO_ON: Final = 3
"""Exit status of one whose job is somebody else's by now, or that could not go on for a reason that may pass."""

METHODS: Final[Mapping[str, Callable[[Work], JobResult]]] = {
    "sft": supervised.train,
    "dpo": preferring.train,
    "orpo": preferring.train,
    "rft": reinforced.train,
    "distill": distilled.train,
}


def do(order: Order) -> int:
    """The job; the exit status."""
    job = order.lease.job
    with Client(order.url, order.lease.token, patience_s=PATIENCE_S) as client, Reporter(client, job, order.lease.lease_s) as reporter:
        try:
            reporter.finish(steered(partial(_worked, client, order.lease, reporter), reporter))
        except LeaseLost as lost:
            log.warning("job %s is somebody else's: %s", job.id, lost)
            return GO_ON
    return 0


def _worked(client: Client, lease: Lease, reporter: Reporter) -> FinishJob:
    job = lease.job
    try:
        with closing(tokenizer_of(client, job.spec.base_model)) as tokenizer:
            guard = Guard(client, job, reporter)
            work = Work(client=client, job=job, cursor=lease.cursor, tokenizer=tokenizer, reporter=reporter, guard=guard, agent=lease.agent)
            result = METHODS[job.spec.method.kind](work)
            return FinishJob(state="succeeded", result=result.model_copy(update={"fidelity": work.fidelity(result.version)}))
    except Steered as asked:
        return stopped(asked)
    except StandsStill as why:
        return FinishJob(state="paused", reason=shown(str(why), MAX_REASON))
    except NothingCameBack as lost:
        # Another process would spend the job's steps on the same.
        return FinishJob(state="paused", reason=shown(lost.why, MAX_REASON))
    except NotKept as error:
        told = f"{error.message}; mend that, a full disk say, and resume the job"
        return FinishJob(state="paused", reason=shown(told, MAX_REASON))
    except BloomeryError as error:
        # What others may mend is tried again; what only the job's owner can is told to him.
        if error.category != "user" and not isinstance(error, Corrupt):
            # Whoever looks at the job sees why it began again, or why it failed in the end.
            reporter.note(error.message, level="error")
            raise
        reporter.check()
        return FinishJob(state="failed", reason=shown(error.message, MAX_REASON))
    except LeaseLost:
        raise
    except Exception as error:
        reporter.note(f"{type(error).__name__}: {reason(error)}", level="error")
        raise


def tokenizer_of(client: Client, base_model: str) -> ChatTokenizer:
    """Of a base model that the server holds, from its directory on this machine."""
    found = next((model for model in client.models() if model.alias == base_model), None)
    if found is None:
        # A job that failed could not be resumed, and the next start of the server may have the model again.
        raise StandsStill(f"base model `{base_model}` is not served any more: start the server with it, and resume the job")
    return ChatTokenizer.load(Path(found.path))


def main() -> None:
    """Read the order and work."""
    logs.configure("job")
    order = Order.model_validate_json(sys.stdin.read())
    try:
        status = do(order)
    except BloomeryError as error:
        log.error("%s", error.message)
        status = GO_ON
    logging.shutdown()
    # The job's end was told, and its place is wanted: threads that were let go, and still wait for answers, are not waited for.
    os._exit(status)


if __name__ == "__main__":
    main()
