import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from bloomery.services.engines.connection import EngineLost
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.pulse import Silence
from bloomery.store.blobs import Blobs
from bloomery.types.arrays import Array
from bloomery.types.errors import Unavailable
from bloomery.types.generation import Generate, GenerateFailed, PromptScored, SampledToken, SampleFinished, SamplerEvent, SamplingParams, Weights
from bloomery.types.protocol import CheckpointWritten, SamplerEvents
from tests.services.fake_engine import BASE, FakeEngine, fake_engine
from tests.services.runs_stage import play, until


class Queueing(FakeEngine):
    """Says nothing of a request until it begins with it."""

    queued: Generate | None = None

    def _sample(self, request: Generate) -> None:
        self.queued = request

    def begin(self) -> None:
        assert self.queued is not None
        super()._sample(self.queued)


def test_a_link_is_ready_once_the_engine_said_who_it_is(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        link = new_link(engine)
        assert not link.ready
        assert "problem" in link.detail()
        async with link:
            connection = await link.wait_ready(60)
            assert link.ready
            assert connection.base_hash == BASE
            assert link.detail()["numerics"] == "fake-numerics"

    play(tmp_path, story)


def test_a_link_waits_for_an_engine_that_starts_late_and_finds_it_again_after_a_death(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        await engine.crash()
        async with new_link(engine) as link:
            with pytest.raises(Unavailable, match=f"{BASE} did not answer within 0.01 s"):
                await link.wait_ready(0.01)
            await engine.start()
            first = await link.wait_ready(60)
            await engine.crash()
            await engine.start()
            await until(lambda: link.connection not in (None, first))
            assert link.welcome is not None
            assert link.welcome.boot_id != first.welcome.boot_id
            with pytest.raises(EngineLost):
                first.post(CheckpointWritten(run_id="r", seq=1, key="k", digest="d"))  # type: ignore[arg-type]

    play(tmp_path, story)


def test_a_welcome_is_waited_for_as_long_as_an_executor_may_be_silent(tmp_path: Path) -> None:
    connections: list[asyncio.StreamWriter] = []

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    async def run() -> None:
        link = EngineLink(BASE, tmp_path / "s", None, Silence(process=1, executor=6, look_s=0.05))
        async with asyncio.timeout(60), await asyncio.start_unix_server(busy, tmp_path / "s"), link:
            await until(lambda: link.silent)
            assert link.problem == "Silent: it did not say who it is for 0.3 s"
        for connection in connections:
            connection.close()

    asyncio.run(run())


def test_an_engine_of_another_base_is_refused(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with EngineLink("base-2", engine.socket, asyncio.Queue()) as link:
            await until(lambda: "holds base model base-1, not base-2" in link.detail()["problem"])
            assert not link.ready

    play(tmp_path, story)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"\x03\x00\x00\x00abc", b""])
def test_a_stranger_at_the_socket_is_no_engine(tmp_path: Path, greeting: bytes) -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(stranger, tmp_path / "s")
        async with asyncio.timeout(60), server, EngineLink(BASE, tmp_path / "s", asyncio.Queue()) as link:
            await until(lambda: "not reached yet" not in link.detail()["problem"])
            assert not link.ready

    asyncio.run(run())


def test_messages_about_runs_arrive_in_order_behind_their_welcome(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        inbox: asyncio.Queue = asyncio.Queue()
        async with EngineLink(BASE, engine.socket, inbox) as link:
            connection = await link.wait_ready(60)
            for seq in range(3):
                engine._post(CheckpointWritten(run_id="r", seq=seq, key="k", digest="d"))
            received = [await inbox.get() for _ in range(4)]
            assert received[0].message == connection.welcome
            assert [each.message.seq for each in received[1:]] == [0, 1, 2]
            assert {each.connection for each in received} == {connection}

    play(tmp_path, story)


def test_requests_at_the_same_time_get_their_own_events(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            several = await asyncio.gather(*(collect(link, ask(f"r{n}", samples=n + 1, tokens=3, score=n == 0)) for n in range(4)))
            for n, events in enumerate(several):
                assert {event.request_id for event in events} == {f"r{n}"}
                assert sum(isinstance(event, SampledToken) for event in events) == 3 * (n + 1)
                assert sum(isinstance(event, SampleFinished) for event in events) == n + 1
            assert isinstance(several[0][0], PromptScored)
            assert link.status is not None

    play(tmp_path, story)


def test_a_link_knows_whether_more_of_a_request_has_come(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link, aclosing(link.generate(ask("r", tokens=2))) as events:
            assert not link.holds_more("r")
            await anext(events)
            await until(lambda: link.holds_more("r"))
            assert len([event async for event in events]) == 2
            assert not link.holds_more("r")

    play(tmp_path, story)


def test_a_request_that_scores_only_ends(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            events = await collect(link, ask("r", tokens=0, score=True))
            assert [type(event) for event in events] == [PromptScored, SampleFinished]

    play(tmp_path, story)


def test_a_failed_request_ends_with_the_reason(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            asking = asyncio.create_task(collect(link, ask("r", endless=True)))
            await until(lambda: link.status is not None)
            engine._post(SamplerEvents(events=(GenerateFailed(request_id="r", message="no", category="server"),)))
            assert isinstance((await asking)[-1], GenerateFailed)

    play(tmp_path, story)


def test_a_request_is_waited_for_as_long_as_it_stands_in_the_queue_of_an_engine_that_lives(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Queueing(tmp_path / "s", Blobs(tmp_path / "blobs"))
        await engine.start()
        async with new_link(engine) as link:
            asking = asyncio.create_task(collect(link, ask("r")))
            await until(lambda: engine.queued is not None)
            # Of the loop alone: an hour is over, and nobody has looked more than once.
            loop = asyncio.get_running_loop()
            before, loop.time = loop.time, lambda: before() + 3600  # type: ignore[method-assign]
            await asyncio.sleep(0.05)
            engine.begin()
            assert isinstance((await asking)[-1], SampleFinished)
        await engine.crash()

    asyncio.run(run())


def test_leaving_early_aborts_the_request(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            async with aclosing(link.generate(ask("r", endless=True))) as events:
                await anext(events)
            await until(lambda: [abort.request_id for abort in engine.aborted] == ["r"])
            await collect(link, ask("done"))
            assert len(engine.aborted) == 1

    play(tmp_path, story)


@pytest.mark.parametrize("death", ["crash", "hang_up"])
def test_a_lost_engine_ends_its_requests_so_that_they_can_be_asked_again(tmp_path: Path, death: str) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            events: list[SamplerEvent] = []

            async def read() -> None:
                async for event in link.generate(ask("r", tokens=4, endless=True)):
                    events.append(event)

            reading = asyncio.create_task(read())
            await until(lambda: len(events) == 3)
            if death == "crash":
                await engine.crash()
                await engine.start()
            else:
                engine.hang_up()
            with pytest.raises(EngineLost, match=BASE):
                await reading
            assert len(await collect(link, ask("r", tokens=4))) == 5

    play(tmp_path, story)


def test_a_request_that_a_process_standing_still_has_no_room_for_ends_with_the_connection(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with EngineLink(BASE, engine.socket, asyncio.Queue(), Silence(process=3, look_s=0.05)) as link:
            await link.wait_ready(60)
            engine.stand_still()
            with pytest.raises(EngineLost):
                await collect(link, ask("r", prompt=[5] * 3_000_000))
            engine.go_on()

    play(tmp_path, story)


def test_draining_checkpoints_what_the_engine_holds(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with new_link(engine) as link:
            await link.wait_ready(60)
            assert await link.drain(10)
            await engine.crash()
            await until(lambda: not link.ready)
            assert not await link.drain(10)

    play(tmp_path, story)


def test_a_large_message_passes_both_ways(tmp_path: Path) -> None:
    async def run() -> None:
        async with fake_engine(tmp_path / "s", Blobs(tmp_path / "blobs")) as engine, new_link(engine) as link, asyncio.timeout(60):
            events = await collect(link, ask("r", prompt=[5] * 3_000_000, tokens=1, score=True))
            assert isinstance(events[0], PromptScored)
            assert events[0].logprobs.shape == (3_000_000,)

    asyncio.run(run())


def new_link(engine: FakeEngine) -> EngineLink:
    return EngineLink(BASE, engine.socket, asyncio.Queue())


async def collect(link: EngineLink, request: Generate) -> list[SamplerEvent]:
    return [event async for event in link.generate(request)]


def ask(
    request_id: str, *, samples: int = 1, tokens: int = 2, score: bool = False, endless: bool = False, prompt: list[int] | None = None
) -> Generate:
    return Generate(
        request_id=request_id,
        weights=Weights(version=BASE),
        prompt=Array.of(np.asarray(prompt or [0 if endless else 1, 2], np.int32)),
        params=SamplingParams(max_tokens=tokens, seed=1),
        num_samples=samples,
        prompt_logprobs=score,
    )
