import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from bloomery.api.routes.tinker.completions import Completions, Ended
from bloomery.api.routes.tinker.futures import Load, SampleAnswer, SampleFutures
from bloomery.api.routes.tinker.names import SEQS_OF_A_CLONE, SampleFuture
from bloomery.types.errors import Conflict, Gone, InvalidInput, Unavailable
from bloomery.types.operations import Failed

ONE = Load(1, 10)


def sample(seq: int, sampler: str = "s") -> SampleFuture:
    return SampleFuture(sampler, seq)


def play(story: Callable[[SampleFutures], Awaitable[None]], **bounds: int) -> None:
    async def run() -> None:
        futures = SampleFutures(**bounds)
        await story(futures)
        await futures.close()

    asyncio.run(run())


async def answer(body: bytes) -> SampleAnswer:
    return SampleAnswer(body, "v1", "raw_logprobs")


async def never() -> SampleAnswer:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_answer_can_be_fetched_again() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"x"))
        assert [await futures.wait(sample(0), "me", 5.0) for _ in range(2)] == [SampleAnswer(b"x", "v1", "raw_logprobs")] * 2

    play(story)


def test_a_repeated_submission_joins_the_first() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"first"))
        futures.start(sample(0), "me", ONE, partial(answer, b"second"))
        assert await futures.wait(sample(0), "me", 5.0) == SampleAnswer(b"first", "v1", "raw_logprobs")

    play(story)


def test_another_sample_of_the_same_number_is_none_of_the_first() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"first"), asked=b"one")
        for _ in range(2):
            with pytest.raises(Conflict, match="another body"):
                futures.start(sample(0), "me", ONE, partial(answer, b"second"), asked=b"two")
            assert await futures.wait(sample(0), "me", 5.0) == SampleAnswer(b"first", "v1", "raw_logprobs")

    play(story)


def test_a_sample_in_the_making_has_no_answer_yet_and_one_that_is_cancelled_is_gone() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, never)
        assert await futures.wait(sample(0), "me", 0.0) is None
        futures.cancel(sample(0), "me")
        with pytest.raises(Gone):
            await futures.wait(sample(0), "me", 5.0)

    play(story)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_cancelled_sample_is_begun_anew_when_it_is_asked_again(noticed: bool) -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, never)
        futures.cancel(sample(0), "me")
        if noticed:
            with pytest.raises(Gone):
                await futures.wait(sample(0), "me", 5.0)
        futures.start(sample(0), "me", ONE, partial(answer, b"again"))
        assert await futures.wait(sample(0), "me", 5.0) == SampleAnswer(b"again", "v1", "raw_logprobs")
        assert await futures.wait(sample(0), "me", 5.0) == SampleAnswer(b"again", "v1", "raw_logprobs")

    play(story)


def reluctant(gate: asyncio.Event) -> Callable[[], Coroutine[Any, Any, SampleAnswer]]:
    """A sample that goes on for a while when it is cancelled."""

    async def make() -> SampleAnswer:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await gate.wait()
        return SampleAnswer(b"old", "v", "raw_logprobs")

    return make


def test_a_late_end_of_what_was_begun_anew_is_not_that_ones_end() -> None:
    async def story(futures: SampleFutures) -> None:
        gate = asyncio.Event()
        futures.start(sample(0), "me", ONE, reluctant(gate))
        await asyncio.sleep(0)
        futures.cancel(sample(0), "me")
        futures.start(sample(0), "me", ONE, never)
        gate.set()
        assert await futures.ended("s", 0, 0, 0.01) == Ended([], 0)
        assert futures._running == ONE
        futures.cancel(sample(0), "me")
        assert told(await futures.ended("s", 0, 0, 5.0)) == [("sample|s|0", None)]

    play(story)


def test_what_was_begun_anew_may_be_over_and_let_go_of_before_the_first_ends() -> None:
    problems: list[dict[str, Any]] = []

    async def story(futures: SampleFutures) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        gate = asyncio.Event()
        futures.start(sample(0), "me", ONE, reluctant(gate))
        await asyncio.sleep(0)
        first = futures._entries[sample(0).request_id].task
        futures.cancel(sample(0), "me")
        futures.start(sample(0), "me", ONE, partial(answer, b"new"))
        assert await futures.wait(sample(0), "me", 5.0) == SampleAnswer(b"new", "v1", "raw_logprobs")
        await ended_all(futures)
        futures.forget([sample(0).request_id], "s")
        gate.set()
        await asyncio.wait({first})
        await asyncio.sleep(0)
        assert futures._running == Load(0, 0)
        with pytest.raises(Gone):
            await futures.ended("s", 0, 0, 30.0)

    play(story)
    assert problems == []


def test_failures_are_answers() -> None:
    async def refuse() -> SampleAnswer:
        raise InvalidInput("too long")

    async def break_down() -> SampleAnswer:
        raise RuntimeError("odd")

    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, refuse)
        futures.start(sample(1), "me", ONE, break_down)
        assert await futures.wait(sample(0), "me", 5.0) == Failed(message="too long", category="user")
        broken = await futures.wait(sample(1), "me", 5.0)
        assert isinstance(broken, Failed)
        assert (broken.category, "RuntimeError: odd" in broken.message) == ("server", True)

    play(story)


def test_others_cannot_see_it() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"x"))
        for name, owner in ((sample(0), "stranger"), (sample(1), "me")):
            with pytest.raises(Gone, match="submit it again"):
                await futures.wait(name, owner, 0.0)

    play(story)


def test_memory_is_bounded() -> None:
    async def story(futures: SampleFutures) -> None:
        for seq in range(3):
            futures.start(sample(seq), "me", ONE, partial(answer, b"x" * 10))
            await futures.wait(sample(seq), "me", 5.0)
        await asyncio.sleep(0)
        with pytest.raises(Gone):
            await futures.wait(sample(0), "me", 0.0)
        assert await futures.wait(sample(2), "me", 5.0) is not None
        futures.start(sample(3), "me", ONE, never)
        with pytest.raises(Unavailable, match="in the making"):
            futures.start(sample(4), "me", ONE, never)

    play(story, max_running=1, max_kept_bytes=25)


@pytest.mark.parametrize(
    ("running", "more", "fits"),
    [
        (Load(3, 10), Load(1, 10), True),
        (Load(3, 10), Load(2, 10), False),
        (Load(1, 70), Load(1, 30), True),
        (Load(1, 70), Load(1, 31), False),
    ],
)
def test_sequences_and_prompt_tokens_in_the_making_are_bounded(running: Load, more: Load, fits: bool) -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", running, never)
        if fits:
            futures.start(sample(1), "me", more, never)
        else:
            with pytest.raises(Unavailable, match="are in the making"):
                futures.start(sample(1), "me", more, never)
        assert futures.turned_away == (0 if fits else 1)

    play(story, max_running=4, max_running_tokens=100)


def test_a_sample_larger_than_the_bounds_is_made_when_nothing_else_is() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", Load(9, 999), partial(answer, b"x"))
        with pytest.raises(Unavailable):
            futures.start(sample(1), "me", ONE, never)
        assert await futures.wait(sample(0), "me", 5.0) is not None
        await asyncio.sleep(0)
        futures.start(sample(1), "me", Load(9, 999), never)

    play(story, max_running=4, max_running_tokens=100)


# Which samples have ended


def told(ended: Ended) -> list[tuple[str, int | None]]:
    return [(completion.request_id, completion.size) for completion in ended.completions]


async def ended_all(futures: SampleFutures) -> None:
    async with asyncio.timeout(60):
        while not all(entry.task.done() for entry in futures._entries.values()):
            await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_ends_are_told_in_their_order_until_they_are_acknowledged() -> None:
    async def refuse() -> SampleAnswer:
        raise InvalidInput("too long")

    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"xyz"))
        futures.start(sample(1), "me", ONE, refuse)
        await ended_all(futures)
        first = await futures.ended("s", 0, 0, 5.0)
        assert told(first) == [("sample|s|0", 3), ("sample|s|1", None)]
        assert await futures.ended("s", 0, 0, 0.0) == first
        assert await futures.ended("s", 0, first.cursor, 0.0) == Ended([], first.cursor)
        assert await futures.ended("s", 0, 0, 0.0) == Ended([], 0)

    play(story)


def test_a_question_waits_for_the_first_end_and_no_longer_than_asked() -> None:
    async def story(futures: SampleFutures) -> None:
        gate = asyncio.Event()

        async def later() -> SampleAnswer:
            await gate.wait()
            return SampleAnswer(b"x", "v", "raw_logprobs")

        futures.start(sample(0), "me", ONE, later)
        assert await futures.ended("s", 0, 7, 0.01) == Ended([], 7)
        asking = [asyncio.ensure_future(futures.ended("s", 0, 0, 30.0)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        for each in asking:
            assert told(await each) == [("sample|s|0", 1)]

    play(story)


def test_each_client_of_a_sampler_hears_of_its_own() -> None:
    async def story(futures: SampleFutures) -> None:
        far = 10**9 * SEQS_OF_A_CLONE - 1
        for future in (sample(5), sample(SEQS_OF_A_CLONE), sample(far), sample(5, "other")):
            futures.start(future, "me", ONE, partial(answer, b"x"))
        await ended_all(futures)
        assert told(await futures.ended("s", 0, 0, 0.0)) == [("sample|s|5", 1)]
        assert told(await futures.ended("s", 1, 0, 0.0)) == [(f"sample|s|{SEQS_OF_A_CLONE}", 1)]
        assert told(await futures.ended("s", 10**9 - 1, 0, 0.0)) == [(f"sample|s|{far}", 1)]

    play(story)


def test_a_cancelled_sample_has_ended_too() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, never)
        futures.cancel(sample(0), "me")
        assert told(await futures.ended("s", 0, 0, 5.0)) == [("sample|s|0", None)]

    play(story)


def test_whoever_waits_for_what_nobody_makes_is_told_so() -> None:
    async def story(futures: SampleFutures) -> None:
        assert await futures.ended("s", 0, 5, 0.0) == Ended([], 5)
        with pytest.raises(Gone, match="submit again"):
            await futures.ended("s", 0, 5, 30.0)

    play(story)


def test_whoever_has_an_answer_is_not_told_of_it() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start(sample(0), "me", ONE, partial(answer, b"x"))
        await ended_all(futures)
        await futures.wait(sample(0), "me", 5.0)
        assert await futures.ended("s", 0, 0, 0.0) == Ended([], 0)

    play(story)


def test_cursors_of_the_next_life_lie_behind_those_of_the_last() -> None:
    async def last(completions: Completions) -> int:
        completions.begin(sample(0))
        completions.end(sample(0), 1)
        return (await completions.ended("s", 0, 0, 0.0)).cursor

    async def run() -> None:
        before, again = await last(Completions()), Completions()
        assert await last(again) > before
        assert told(await again.ended("s", 0, before, 0.0)) == [("sample|s|0", 1)]

    asyncio.run(run())


def test_ends_that_nobody_asks_about_are_forgotten_one_day() -> None:
    async def run() -> None:
        completions = Completions(max_untold=3)
        for seq in range(5):
            completions.begin(sample(seq, f"s{seq % 2}"))
            completions.end(sample(seq, f"s{seq % 2}"), 1)
        asked = [told(await completions.ended(name, 0, 0, 0.0)) for name in ("s0", "s1")]
        assert asked == [[("sample|s0|2", 1), ("sample|s0|4", 1)], [("sample|s1|3", 1)]]

    asyncio.run(run())


def test_answers_that_the_client_has_are_let_go_of() -> None:
    async def story(futures: SampleFutures) -> None:
        for future in (sample(0), sample(1), sample(0, "s1")):
            futures.start(future, "me", ONE, partial(answer, b"x"))
        await ended_all(futures)
        futures.forget(["sample|s|0", "sample|s|7", "sample|s1|0", "operation|s|1|"], "s")
        with pytest.raises(Gone):
            await futures.wait(sample(0), "me", 0.0)
        for future in (sample(1), sample(0, "s1")):
            assert await futures.wait(future, "me", 0.0) is not None

    play(story)
