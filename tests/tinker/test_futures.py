import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from bloomery.api.routes.tinker.futures import SampleAnswer, SampleFutures
from bloomery.types.errors import Gone, InvalidInput, NotFound, Unavailable
from bloomery.types.operations import Failed


def play(story: Callable[[SampleFutures], Awaitable[None]], **bounds: int) -> None:
    async def run() -> None:
        futures = SampleFutures(**bounds)
        await story(futures)
        await futures.close()

    asyncio.run(run())


async def answer(body: bytes) -> SampleAnswer:
    return SampleAnswer(body, "v1")


async def never() -> SampleAnswer:
    await asyncio.Event().wait()
    raise AssertionError


def test_an_answer_can_be_fetched_again() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start("a", "me", partial(answer, b"x"))
        assert [await futures.wait("a", "me", 5.0) for _ in range(2)] == [SampleAnswer(b"x", "v1")] * 2

    play(story)


def test_a_repeated_submission_joins_the_first() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start("a", "me", partial(answer, b"first"))
        futures.start("a", "me", partial(answer, b"second"))
        assert await futures.wait("a", "me", 5.0) == SampleAnswer(b"first", "v1")

    play(story)


def test_a_sample_in_the_making_has_no_answer_yet_and_one_that_is_cancelled_is_gone() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start("a", "me", never)
        assert await futures.wait("a", "me", 0.0) is None
        futures.cancel("a", "me")
        with pytest.raises(Gone):
            await futures.wait("a", "me", 5.0)

    play(story)


def test_failures_are_answers() -> None:
    async def refuse() -> SampleAnswer:
        raise InvalidInput("too long")

    async def break_down() -> SampleAnswer:
        raise RuntimeError("odd")

    async def story(futures: SampleFutures) -> None:
        futures.start("a", "me", refuse)
        futures.start("b", "me", break_down)
        assert await futures.wait("a", "me", 5.0) == Failed(message="too long", category="user")
        broken = await futures.wait("b", "me", 5.0)
        assert isinstance(broken, Failed)
        assert (broken.category, "RuntimeError: odd" in broken.message) == ("server", True)

    play(story)


def test_others_cannot_see_it() -> None:
    async def story(futures: SampleFutures) -> None:
        futures.start("a", "me", partial(answer, b"x"))
        with pytest.raises(NotFound):
            await futures.wait("a", "stranger", 0.0)
        with pytest.raises(Gone, match="submit it again"):
            await futures.wait("b", "me", 0.0)

    play(story)


def test_memory_is_bounded() -> None:
    async def story(futures: SampleFutures) -> None:
        for name in "abc":
            futures.start(name, "me", partial(answer, b"x" * 10))
            await futures.wait(name, "me", 5.0)
        await asyncio.sleep(0)
        with pytest.raises(Gone):
            await futures.wait("a", "me", 0.0)
        assert await futures.wait("c", "me", 5.0) is not None
        futures.start("d", "me", never)
        with pytest.raises(Unavailable, match="in the making"):
            futures.start("e", "me", never)

    play(story, max_running=1, max_kept_bytes=25)
