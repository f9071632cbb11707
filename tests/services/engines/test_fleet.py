"""Who answers: what is served goes to replicas and moves between them, what is trained with stays at the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest

from bloomery.services.engines.fleet import AFFINITY_TOKENS, PATIENCE_S, Fleet, Group
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.engines.pulse import Silence
from bloomery.services.serving.meters import Meter, Meters
from bloomery.services.serving.sampling import Progress, SampleStream
from bloomery.store.blobs import Blobs
from bloomery.types.arrays import Array
from bloomery.types.errors import Unavailable
from bloomery.types.generation import Generate, SampledToken, SamplingParams, Weights
from bloomery.types.protocol import Role
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import until
from tests.services.stage import ME, Stage
from tests.services.stage import play as play_on_stage

REPLICAS = ("replica-0", "replica-1")
SOON = Silence(process=10, look_s=0.05)


class Mortal(FakeEngine):
    """Dies in the middle of an answer as often as it is told to, or stands still there."""

    alive_every_s = 0.05
    deaths = 0
    freezes = False
    numerics_after: str | None = None

    def _sample(self, request: Generate) -> None:
        super()._sample(with_tokens(request, 2) if self.deaths or self.freezes else request)
        if self.freezes:
            self.freezes = False
            self.stand_still()
        if self.deaths:
            self.deaths -= 1
            self.numerics = self.numerics_after or self.numerics
            self.hang_up()


class Deadly(FakeEngine):
    """Dies of its first request."""

    dead = False

    def _sample(self, request: Generate) -> None:
        assert self._server is not None
        self.dead = True
        self._server.close()
        self.socket.unlink()
        self.hang_up()


@dataclass
class Stand:
    """An engine, two replicas, and the api's end of them."""

    directory: Path
    stack: AsyncExitStack
    processes: dict[str, Mortal] = field(default_factory=dict)
    links: dict[str, EngineLink] = field(default_factory=dict)
    meters: list[Meters] = field(default_factory=list)

    async def start(self, name: str, role: Role) -> None:
        self.processes[name] = Mortal(self.directory / name, Blobs(self.directory / "blobs"), role=role)
        await self.processes[name].start()
        self.stack.push_async_callback(self.processes[name].crash)

    async def turn(self, process: FakeEngine, numerics: str) -> None:
        """As if it had been started again on another machine."""
        link = self.links[next(name for name, each in self.processes.items() if each is process)]
        process.numerics = numerics
        process.hang_up()
        await until(lambda: (welcome := link.welcome) is not None and welcome.numerics == numerics)

    async def sample_with(self, process: FakeEngine, numerics: str) -> None:
        """As if it had been started again with threads on which nothing of what it samples depends, if these are the same for others."""
        link = self.links[next(name for name, each in self.processes.items() if each is process)]
        process.sampling_numerics = numerics
        process.hang_up()
        await until(lambda: (welcome := link.welcome) is not None and welcome.sampling_numerics == numerics)

    def fleet(self, *replicas: str, deployed: frozenset[str] = frozenset(), patience_s: float = PATIENCE_S, rollouts: tuple[str, ...] = ()) -> Fleet:
        serving, sampling = ({BASE: {name: self.links[name] for name in names}} for names in (replicas, rollouts))
        return Fleet({BASE: self.links["engine"]}, serving, deployed, patience_s, sampling)

    def stream(self, group: Group | None, request: Generate) -> SampleStream:
        assert group is not None

        def measure() -> Meter:
            return self.meters[0].request(BASE, request, bounded=False)

        return SampleStream(group, request, measure)

    async def first(self, group: Group) -> Mortal:
        """The replica that an idle group chooses."""
        chosen = (await group.choose(ask(), None)).link
        return next(self.processes[name] for name in REPLICAS if self.links[name] is chosen)


@asynccontextmanager
async def open_stand(directory: Path) -> AsyncIterator[Stand]:
    async with AsyncExitStack() as stack:
        stand = Stand(directory, stack)
        for name in ("engine", *REPLICAS):
            link = EngineLink(BASE, directory / name, asyncio.Queue() if name == "engine" else None, SOON)
            stand.links[name] = await stack.enter_async_context(link)
        config = fake_base(directory)
        stand.meters.append(Meters(Models([config], {BASE: stand.links["engine"]}), {BASE: {"engine": stand.links["engine"]}}, 64))
        yield stand


def play(directory: Path, story: Callable[[Stand], Awaitable[None]], *, running: tuple[str, ...] = ("engine", *REPLICAS)) -> None:
    async def run() -> None:
        async with open_stand(directory) as stand, asyncio.timeout(60):
            for name in running:
                await stand.start(name, "engine" if name == "engine" else "replica")
                await stand.links[name].wait_ready(60)
            await story(stand)

    asyncio.run(run())


def ask(*prompt: int, tokens: int = 6, **changes: object) -> Generate:
    return Generate(
        request_id="",
        weights=Weights(version=BASE),
        prompt=Array.of(np.array(prompt or (5, 6), np.int32)),
        params=SamplingParams(max_tokens=tokens, seed=1),
        **changes,  # type: ignore[arg-type]
    )


def with_tokens(request: Generate, tokens: int) -> Generate:
    """The same request, of which no more is answered, and never to the end."""
    prompt = Array.of(np.array([0, 1], np.int32))
    return Generate(request_id=request.request_id, weights=request.weights, prompt=prompt, params=SamplingParams(max_tokens=tokens + 1, seed=1))


async def read(stream: SampleStream) -> list[Progress]:
    return [event async for event in stream]


def positions(events: list[Progress]) -> list[int]:
    return [event.position for event in events if isinstance(event, SampledToken)]


def test_a_stream_whose_replica_dies_goes_on_at_another_one(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        group = served(stand.fleet(*REPLICAS))
        (await stand.first(group)).deaths = 1
        assert positions(await read(stand.stream(group, ask()))) == [0, 1, 2, 3, 4, 5]
        assert {name: len(process.sampled) for name, process in stand.processes.items()} == {"engine": 0, **dict.fromkeys(REPLICAS, 1)}

    play(tmp_path, story)


def test_a_stream_whose_replica_stands_still_goes_on_at_another_one_and_what_comes_back_says_nothing_twice(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        fleet = stand.fleet(*REPLICAS)
        frozen = await stand.first(served(fleet))
        link = next(stand.links[name] for name in REPLICAS if stand.processes[name] is frozen)
        frozen.freezes = True
        assert positions(await read(stand.stream(served(fleet), ask()))) == [0, 1, 2, 3, 4, 5]
        assert "process gave no sign of life for 0.5 s" in link.problem
        assert (link.ready, link.silent, fleet.silent) == (False, True, [])
        assert [stand.links[name] for name in stand.fleet(*REPLICAS, patience_s=0.0).silent] == [link]
        frozen.go_on()
        await link.wait_ready(60)
        assert not link.silent
        assert await stand.first(served(fleet)) is frozen
        assert positions(await read(stand.stream(served(fleet), ask()))) == [0, 1, 2, 3, 4, 5]

    play(tmp_path, story)


def test_whose_sign_of_life_is_late_is_asked_after_the_others(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        group = served(stand.fleet(*REPLICAS))
        late = await stand.first(group)
        late.stand_still()
        await until(lambda: any(link.late for link in stand.links.values()))
        assert await stand.first(group) is not late
        assert all(link.ready for link in stand.links.values())
        late.go_on()
        await until(lambda: not any(link.late for link in stand.links.values()))
        assert await stand.first(group) is late

    play(tmp_path, story)


def test_a_connection_that_broke_unnoticed_is_not_chosen_again_and_again(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        link = stand.links[REPLICAS[0]]
        broken = await link.connected()
        broken.close()
        assert link.connection is broken
        assert not link.ready
        assert positions(await read(stand.stream(served(stand.fleet(REPLICAS[0])), ask()))) == [0, 1, 2, 3, 4, 5]
        assert link.connection is not broken

    play(tmp_path, story)


def test_a_stream_goes_on_only_where_the_numerics_are_its_own(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        group = served(stand.fleet(*REPLICAS))
        first = await stand.first(group)
        first.deaths = 1
        other = next(stand.processes[name] for name in REPLICAS if stand.processes[name] is not first)
        await stand.turn(other, "other")
        assert positions(await read(stand.stream(group, ask()))) == [0, 1, 2, 3, 4, 5]
        assert (len(first.sampled), len(other.sampled)) == (2, 0)
        await stand.turn(stand.processes["engine"], "other")
        first.deaths, first.numerics_after = 1, "other"
        with pytest.raises(Unavailable, match="nobody among the replicas of base model"):
            await read(stand.stream(group, ask(*first.sampled[0].prompt.numpy().tolist())))

    play(tmp_path, story)


def test_the_least_loaded_replica_answers(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        group = served(stand.fleet(*REPLICAS))
        async with aclosing(stand.stream(group, ask(0, 1))) as one, aclosing(stand.stream(group, ask(0, 1))) as other:
            await anext(one)
            await anext(other)
            assert [stand.links[name].load for name in REPLICAS] == [1, 1]
        await until(lambda: [stand.links[name].load for name in REPLICAS] == [0, 0])

    play(tmp_path, story)


def test_prompts_that_begin_alike_meet_at_one_replica_and_others_spread(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        group = served(stand.fleet(*REPLICAS))
        head = [7] * AFFINITY_TOKENS
        assert len({(await group.choose(ask(*head, *rest), None)).link for rest in ((), (1,), (2, 3))}) == 1
        assert {(await group.choose(ask(token), None)).link for token in range(20)} == {stand.links[name] for name in REPLICAS}

    play(tmp_path, story)


def test_what_is_served_waits_for_replicas_that_are_started_because_of_it(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        fleet = stand.fleet(*REPLICAS)
        assert (fleet.wanted, fleet.ready) == (set(), [])
        reading = asyncio.create_task(read(stand.stream(fleet.group(BASE, production=True), ask())))
        assert fleet.wanted == set()
        fleet.want(BASE)
        assert fleet.wanted == {BASE}
        await stand.start("replica-1", "replica")
        assert positions(await reading) == [0, 1, 2, 3, 4, 5]
        assert fleet.ready == ["replica-1"]
        assert stand.processes["engine"].sampled == []

    play(tmp_path, story, running=("engine",))


def test_a_wait_for_replicas_has_an_end_that_names_them(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        with pytest.raises(Unavailable, match=f"waited 0.01 s for the replicas of base model {BASE}: "):
            await served(stand.fleet(*REPLICAS)).choose(ask(), None, timeout_s=0.01)

    play(tmp_path, story, running=("engine",))


def test_the_engine_stands_in_for_replicas_that_do_not_come_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def told() -> list[str]:
        return [record.message for record in caplog.records if record.name == "bloomery.services.engines.fleet" and "requests" in record.message]

    async def story(stand: Stand) -> None:
        fleet = stand.fleet(*REPLICAS, patience_s=0.02)
        assert fleet.stood_in == set()
        for _ in range(2):
            assert positions(await read(stand.stream(served(fleet), ask()))) == [0, 1, 2, 3, 4, 5]
        assert len(stand.processes["engine"].sampled) == 2
        assert fleet.stood_in == {BASE}
        (warned,) = told()
        assert warned.startswith(f"the engine takes the requests of the replicas of base model {BASE}, nobody of whom has answered for 0.02 s: ")
        await stand.start("replica-1", "replica")
        await stand.links["replica-1"].wait_ready(60)
        assert fleet.stood_in == set()
        await read(stand.stream(served(fleet), ask()))
        assert (len(stand.processes["engine"].sampled), len(stand.processes["replica-1"].sampled)) == (2, 1)
        assert told()[1:] == [f"the replicas of base model {BASE} answer again, and take their requests themselves"]

    play(tmp_path, story, running=("engine",))


def test_a_request_whose_patience_ends_while_it_decides_to_wait_is_the_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = chain([0.001], repeat(-1.0))
    monkeypatch.setattr(Group, "_patience_left_s", lambda _: next(left))

    async def story(stand: Stand) -> None:
        async with asyncio.timeout(60):
            assert positions(await read(stand.stream(served(stand.fleet(*REPLICAS)), ask()))) == [0, 1, 2, 3, 4, 5]
        assert len(stand.processes["engine"].sampled) == 1

    play(tmp_path, story, running=("engine",))


@pytest.mark.parametrize("numerics", ["fake-numerics", "other"])
def test_an_answer_that_a_replica_began_goes_on_at_the_engine_only_where_the_numerics_are_its_own(tmp_path: Path, numerics: str) -> None:
    async def story(stand: Stand) -> None:
        await stand.turn(stand.processes["engine"], numerics)
        replica = stand.processes["replica-0"]
        async with aclosing(stand.stream(served(stand.fleet("replica-0", patience_s=0.02)), ask())) as stream:
            replica.deaths = 1
            got = [await anext(stream), await anext(stream)]
            await replica.crash()
            if numerics == "other":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await anext(stream)
                assert stand.processes["engine"].sampled == []
                return
            got += [event async for event in stream]
        assert positions(got) == [0, 1, 2, 3, 4, 5]
        assert [len(request.begun[0]) for request in stand.processes["engine"].sampled] == [1]

    play(tmp_path, story, running=("engine", "replica-0"))


@pytest.mark.parametrize("same", [True, False])
def test_processes_of_different_threads_go_on_with_each_others_answers_where_what_they_sample_does_not_depend_on_them(
    tmp_path: Path, same: bool
) -> None:
    async def story(stand: Stand) -> None:
        engine, replica = stand.processes["engine"], stand.processes["replica-0"]
        await stand.turn(engine, "two threads")
        await stand.turn(replica, "one thread")
        for process in (engine, replica) if same else ():
            await stand.sample_with(process, "any threads")
        async with aclosing(stand.stream(served(stand.fleet("replica-0", patience_s=0.02)), ask())) as stream:
            replica.deaths = 1
            got = [await anext(stream), await anext(stream)]
            await replica.crash()
            if not same:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await anext(stream)
                assert engine.sampled == []
                return
            got += [event async for event in stream]
        assert positions(got) == [0, 1, 2, 3, 4, 5]
        assert [len(request.begun[0]) for request in engine.sampled] == [1]

    play(tmp_path, story, running=("engine", "replica-0"))


def test_what_an_engine_began_goes_on_there_although_replicas_of_other_numerics_are_back(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        engine = stand.processes["engine"]
        engine.deaths = 1
        async with aclosing(stand.stream(served(stand.fleet("replica-0", patience_s=0.02)), ask())) as stream:
            got = [await anext(stream)]
            await stand.start("replica-0", "replica")
            await stand.turn(stand.processes["replica-0"], "other")
            got += [event async for event in stream]
        assert positions(got) == [0, 1, 2, 3, 4, 5]
        assert (len(engine.sampled), stand.processes["replica-0"].sampled) == (2, [])

    play(tmp_path, story, running=("engine",))


def test_a_request_that_may_have_killed_its_replica_is_kept_from_the_engine(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        replica = Deadly(stand.directory / "replica-0", Blobs(stand.directory / "blobs"), role="replica")
        await replica.start()
        await stand.links["replica-0"].wait_ready(60)
        group = served(stand.fleet("replica-0", patience_s=0.02))
        reading = asyncio.create_task(read(stand.stream(group, ask())))
        await until(lambda: replica.dead and group.stood_in)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reading
        assert stand.processes["engine"].sampled == []

    play(tmp_path, story, running=("engine",))


def test_rollouts_stay_at_the_engine_and_so_does_everything_where_there_are_no_replicas(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        both, alone = stand.fleet(*REPLICAS), stand.fleet()
        for group in (both.group(BASE, production=False), alone.group(BASE, production=True)):
            assert group is not None
            assert group.links == [stand.links["engine"]]
        assert (both.wanted, alone.wanted) == (set(), set())
        assert both.group("another", production=True) is None

    play(tmp_path, story)


def test_rollouts_go_to_replicas_of_their_own_and_what_is_served_never_does(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        fleet = stand.fleet("replica-0", rollouts=("replica-1",))
        assert (fleet.wanted, sorted(fleet.ready), sorted(fleet.beside(BASE))) == (set(), [*REPLICAS], [*REPLICAS])
        for priority, name in (("rollout", "replica-1"), ("evaluation", "replica-1"), ("production", "replica-0")):
            before = {each: len(process.sampled) for each, process in stand.processes.items()}
            assert positions(await read(stand.stream(fleet.group(BASE, production=priority == "production"), ask()))) == [*range(6)]
            assert {each: len(process.sampled) for each, process in stand.processes.items()} == before | {name: before[name] + 1}
        assert fleet.group("another", production=False) is None

    play(tmp_path, story)


def test_a_server_with_replicas_for_rollouts_alone_serves_by_its_engine(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        fleet = stand.fleet(rollouts=REPLICAS)
        assert (fleet.wanted, fleet.stood_in, fleet.silent) == (set(), set(), [])
        await read(stand.stream(fleet.group(BASE, production=True), ask()))
        assert [len(stand.processes[name].sampled) for name in ("engine", *REPLICAS)] == [1, 0, 0]

    play(tmp_path, story)


def test_a_rollout_goes_on_at_the_engine_when_no_replica_for_it_is_left(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        fleet, replica = stand.fleet(rollouts=("replica-0",), patience_s=0.02), stand.processes["replica-0"]
        async with aclosing(stand.stream(fleet.group(BASE, production=False), ask())) as stream:
            replica.deaths = 1
            got = [await anext(stream), await anext(stream)]
            await replica.crash()
            got += [event async for event in stream]
        assert positions(got) == [0, 1, 2, 3, 4, 5]
        assert fleet.stood_in == {BASE}
        assert [len(request.begun[0]) for request in stand.processes["engine"].sampled] == [1]

    play(tmp_path, story, running=("engine", "replica-0"))


def test_an_engine_where_a_replica_should_be_is_not_spoken_to(tmp_path: Path) -> None:
    async def story(stand: Stand) -> None:
        await stand.start("replica-0", "engine")
        await until(lambda: "of the role `engine`, not `replica`" in stand.links["replica-0"].problem)
        assert not stand.links["replica-0"].ready

    play(tmp_path, story, running=("engine",))


def test_the_bases_of_deployments_want_their_replicas_now_and_after_a_restart(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.add_snapshot("version")
        assert stage.deployments.bases == set()
        made = await stage.deployments.create(ME, "served", "version", {})
        assert stage.deployments.bases == {made.base_hash}
        again = await stage.reopened_deployments()
        assert again.bases == {made.base_hash}

    play_on_stage(tmp_path, story)


def served(fleet: Fleet) -> Group:
    fleet.want(BASE)
    group = fleet.group(BASE, production=True)
    assert group is not None
    return group
