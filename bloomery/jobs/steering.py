"""What a job waits for, an agent, a judge or a teacher that never answers, does not keep it from being paused or cancelled.

It works on a thread of its own. Once it is to stand still or to end, and has not come to where it looks itself within moments, it is let go in the
midst of what it does, which is no other end for it than its process's death: whoever goes on with it makes what was in the making again.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from bloomery.jobs.reporting import Reporter, Steered
from bloomery.types.leases import FinishJob

GRACE_S: Final = 2.0
"""For what is almost done: a step whose rollouts are there is trained."""
_LOOK_EVERY_S: Final = 0.2


def steered(work: Callable[[], FinishJob], reporter: Reporter) -> FinishJob:
    """How the work says that the job ended, or how it was asked to; LeaseLost, too, where the job is somebody else's and the work still waits."""
    ended: Future[FinishJob] = Future()
    threading.Thread(target=_settle, args=(work, ended), daemon=True, name="work").start()
    while not _done(ended, _LOOK_EVERY_S):
        try:
            reporter.check()
        except Steered as asked:
            if not _done(ended, GRACE_S):
                return stopped(asked)
    return ended.result()


def stopped(asked: Steered) -> FinishJob:
    """The end of a job that does as it is asked."""
    return FinishJob(state="paused" if asked.wanted == "pause" else "cancelled")


def _settle(work: Callable[[], FinishJob], ended: Future[FinishJob]) -> None:
    try:
        ended.set_result(work())
    except BaseException as error:
        # Whoever waits for it raises it: a thread has nobody to tell.
        ended.set_exception(error)


def _done(ended: Future[FinishJob], within_s: float) -> bool:
    return bool(wait([ended], within_s).done)
