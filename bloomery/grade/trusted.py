"""Level L0: graders in the caller's own process, on threads of their own. For code that one would run anyway: nothing is limited but the waiting."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from bloomery.grade.calling import Grader, Outcome, failure, loaded
from bloomery.types.grading import GradeError, GradeResult

T = TypeVar("T")


async def check(source: str, entry: str, style: str, load_s: float) -> GradeError | None:
    """Why a program cannot be loaded, if it cannot."""
    found = await _loaded(source, entry, style, load_s)
    return found if isinstance(found, GradeError) else None


async def grade(source: str, entry: str, style: str, rows: list[dict[str, Any]], load_s: float, wall_s: float) -> list[GradeResult]:
    """A result for each, in their order."""
    grader = await _loaded(source, entry, style, load_s)
    if isinstance(grader, GradeError):
        return [GradeResult(error=grader)] * len(rows)
    results: list[GradeResult] = []
    while len(results) < len(rows):
        here = rows if grader.together else rows[len(results) : len(results) + 1]
        results += await _graded(grader, here, wall_s)
    return results


async def _graded(grader: Grader, rows: list[dict[str, Any]], wall_s: float) -> list[GradeResult]:
    try:
        return [_result(outcome) for outcome in await _on_a_thread(lambda: grader.outcomes(rows), wall_s)]
    except TimeoutError:
        return [GradeResult.failed("timeout", f"it took longer than {wall_s:g} s")] * len(rows)


async def _loaded(source: str, entry: str, style: str, load_s: float) -> Grader | GradeError:
    try:
        return await _on_a_thread(lambda: loaded(source, entry, style), load_s)
    except TimeoutError:
        return GradeError(kind="timeout", detail=f"while it was loaded: it took longer than {load_s:g} s")
    except Exception as error:
        return GradeError.model_validate(failure(error))


async def _on_a_thread(what: Callable[[], T], wall_s: float) -> T:
    """A thread that nobody waits for at the end: one that hangs must hang alone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            given = what()
        except BaseException as error:
            _tell(loop, done, None, error if isinstance(error, Exception) else RuntimeError(f"it raised {type(error).__name__}"))
        else:
            _tell(loop, done, given, None)

    threading.Thread(target=run, name="trusted-grader", daemon=True).start()
    async with asyncio.timeout(wall_s):
        return await done


def _tell(loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Any]", given: object, error: Exception | None) -> None:
    def set_it() -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(given)

    try:
        loop.call_soon_threadsafe(set_it)
    except RuntimeError:
        # The loop has ended in the meantime.
        return


def _result(outcome: Outcome) -> GradeResult:
    return GradeResult.failed(outcome["kind"], outcome["detail"]) if "kind" in outcome else GradeResult.model_validate(outcome)
