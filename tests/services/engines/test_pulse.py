"""Signs of life: a process that stands still is told from one that computes one thing for long."""

import asyncio

from bloomery.infer.embedded import Deadlines
from bloomery.services.engines.pulse import SILENCE, Pulse, Silence, Silent
from bloomery.types.protocol import Alive, Drained, FromEngine

LIMIT = Silence(process=3, executor=6, look_s=0.0)


def problem(*heard: FromEngine | None) -> str | None:
    """What whoever reads is told after so many looks, before each of which this was heard."""

    async def run() -> str | None:
        reader, pulse = asyncio.StreamReader(), Pulse(LIMIT)
        watching = asyncio.create_task(pulse.watch(reader))
        await asyncio.sleep(0)
        for message in heard:
            if message is not None:
                pulse.feel(message)
            await asyncio.sleep(0)
        watching.cancel()
        error = reader.exception()
        assert error is None or isinstance(error, Silent)
        return None if error is None else error.message

    return asyncio.run(run())


def test_a_process_that_gives_no_sign_of_life_is_given_up() -> None:
    assert problem(*[None] * 2) is None
    assert problem(*[None] * 4) == "its process gave no sign of life for 0 s"


def test_a_sign_of_life_is_missing_from_three_looks_on() -> None:
    async def late() -> list[bool]:
        pulse = Pulse(SILENCE._replace(look_s=0.0))
        watching = asyncio.create_task(pulse.watch(asyncio.StreamReader()))
        seen = []
        for _ in range(5):
            await asyncio.sleep(0)
            seen.append(pulse.late)
        watching.cancel()
        return seen

    assert asyncio.run(late()) == [False, False, False, True, True]


def test_a_long_step_of_the_executor_is_waited_for_while_its_process_lives() -> None:
    assert problem(*[Alive()] * 5) is None
    assert problem(*[Alive()] * 7) == "its process lives, but its executor ended no step for 0 s"


def test_whatever_the_executor_says_is_a_sign_of_both() -> None:
    assert problem(*[Drained(), None] * 10) is None


def test_an_executor_is_waited_for_as_long_as_the_thread_of_an_embedded_engine() -> None:
    assert SILENCE.executor * SILENCE.look_s == Deadlines().step_s
