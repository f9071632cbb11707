"""Names become weights, bad requests are refused by field, and an answer survives the engine that began it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.config import ModelConfig
from bloomery.services.engines.fleet import Fleet
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models, Size
from bloomery.services.serving.meters import Meters
from bloomery.services.serving.sampling import MAX_SUBMISSIONS, SampleStream, Sampling, draw_seed
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.staging import Staging
from bloomery.services.weights.target import Target
from bloomery.services.weights.versions import Versions
from bloomery.store.blobs import Blobs
from bloomery.store.database import Database
from bloomery.types.arrays import Array
from bloomery.types.checks import MAX_EXPERTS_TOLD, check_generate
from bloomery.types.errors import BloomeryError, Category, Conflict, Corrupt, Deadly, Forbidden, InvalidInput, NotFound, Unavailable, WorkerError
from bloomery.types.generation import (
    Abort,
    Generate,
    PromptRouted,
    PromptScored,
    PromptTargets,
    SampledToken,
    SampleFinished,
    SamplerEvent,
    SamplingParams,
    Weights,
)
from bloomery.types.kept import KeptTokens
from bloomery.types.protocol import SamplerEvents
from bloomery.types.routing import RoutingShape
from tests.api.server import serving
from tests.render.builders import small_config
from tests.services.fake_engine import BASE, FakeEngine, routed
from tests.services.runs_stage import until
from tests.services.stage import ME
from tests.store.template import migrated

TARGET = Target(Weights(version=BASE), BASE, None, None, "tiny")
ENDLESS = (0, 1)
"""The fake keeps the last token of an answer to such a prompt to itself."""


class DyingEngine(FakeEngine):
    """Breaks off the first `deaths` answers, each further on than the one before; afterwards it answers to the end, `shift` tokens beside."""

    def __init__(self, *args: Any, deaths: int, shift: int = 0) -> None:
        super().__init__(*args)
        self.deaths, self.shift, self.requests = deaths, shift, 0

    def _sample(self, request: Generate) -> None:
        self.requests += 1
        if self.requests > self.deaths and not self.shift:
            super()._sample(request)
            return
        shift = self.shift if self.requests > self.deaths else 0
        events: list[SamplerEvent] = routed(request)
        events += [
            SampledToken(request_id=request.request_id, sample=0, position=position, token=100 + position + shift, logprob=-1.0)
            for position in range(min(self.requests + 1, request.params.max_tokens))
        ]
        self._post(SamplerEvents(events=tuple(events)))
        if self.requests <= self.deaths:
            self.hang_up()


class KeepingEngine(FakeEngine):
    """Tells two tokens that a draft had right in one event, and goes away; comes back with `second`, from where it is asked to go on."""

    def __init__(self, *args: Any, second: tuple[int, ...] = (100, 101, 102)) -> None:
        super().__init__(*args)
        self.second, self.begun = second, list[tuple[tuple[int, ...], ...]]()

    def _sample(self, request: Generate) -> None:
        self.begun.append(request.begun)
        first = len(request.begun[0]) if request.begun else 0
        tokens = (100, 101) if len(self.begun) == 1 else self.second[first:]
        kept = KeptTokens(request_id=request.request_id, sample=0, position=first, tokens=tokens, logprobs=(-1.0,) * len(tokens))
        if len(self.begun) == 1:
            self._post(SamplerEvents(events=(kept,)))
            self.hang_up()
        else:
            self._post(SamplerEvents(events=(kept, SampleFinished(request_id=request.request_id, sample=0, reason="length"))))


@asynccontextmanager
async def open_sampling(directory: Path) -> AsyncIterator[Sampling]:
    (directory / "config.json").write_text(json.dumps(small_config(300, context=64)))
    config = ModelConfig(alias="tiny", path=str(directory), base_hash=BASE, dtype="float32", threads=1, socket=str(directory / "s"))
    async with AsyncExitStack() as stack:
        database = stack.enter_context(Database(migrated(directory / "bloomery.db")))
        link = await stack.enter_async_context(EngineLink(BASE, directory / "s", asyncio.Queue()))
        models = Models([config], {BASE: link})
        versions = Versions(database, models)
        meters = Meters(models, {BASE: {"engine": link}}, 64)
        deployed: set[str] = set()
        fleet = Fleet({BASE: link}, {}, deployed)
        yield Sampling(fleet, models, Deployments(database, models, versions, Staging(fleet), deployed), versions, meters)


def play(directory: Path, story: Callable[[Sampling], Awaitable[None]], engine: FakeEngine | None = None) -> None:
    async def run() -> None:
        listening = engine or FakeEngine(directory / "s", Blobs(directory / "blobs"))
        await listening.start()
        async with open_sampling(directory) as sampling, asyncio.timeout(60):
            await story(sampling)
        await listening.crash()

    asyncio.run(run())


def dying(directory: Path, **options: int) -> DyingEngine:
    return DyingEngine(directory / "s", Blobs(directory / "blobs"), **options)


def request(prompt: tuple[int, ...] = (5, 6), max_tokens: int = 4, **changes: Any) -> Generate:
    params = {name: changes.pop(name) for name in ("seed", "temperature", "top_p", "top_k") if name in changes}
    tokens = Array.of(np.asarray(prompt, np.int32))
    return Generate(
        request_id="", weights=Weights(version=""), prompt=tokens, params=SamplingParams(max_tokens=max_tokens, **{"seed": 1} | params), **changes
    )


def targets(positions: tuple[int, ...], ids: tuple[int, ...]) -> PromptTargets:
    return PromptTargets(positions=Array.of(np.array(positions, np.int32)), ids=Array.of(np.array(ids, np.int32)))


async def tokens_of(stream: SampleStream) -> list[int]:
    """All that is sampled, to the end."""
    return [event.token async for event in stream if isinstance(event, SampledToken)]


def metric(sampling: Sampling, name: str) -> float:
    (told,) = [line for line in sampling._meters.exposition().decode().splitlines() if line.startswith(f"{name}{{")]
    return float(told.rpartition(" ")[2])


def test_what_was_asked_about_the_prompt_comes_first_and_every_sample_ends(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        events = [event async for event in sampling.stream(ME, TARGET, request(num_samples=2, prompt_logprobs=True))]
        assert isinstance(events[0], PromptScored)
        for sample, expected in ((0, [100, 101, 102, 103]), (1, [110, 111, 112, 113])):
            *tokens, end = [event for event in events[1:] if not isinstance(event, PromptScored) and event.sample == sample]
            assert [(event.position, event.token, event.logprob) for event in tokens] == [(at, token, -1.0) for at, token in enumerate(expected)]
            assert isinstance(end, SampleFinished)
            assert end.reason == "length"
        assert engine.sampled[-1].weights == TARGET.weights

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


@pytest.mark.parametrize("deaths", [1, MAX_SUBMISSIONS - 1])
def test_a_stream_goes_on_where_it_was_when_the_engine_comes_back(tmp_path: Path, deaths: int) -> None:
    async def story(sampling: Sampling) -> None:
        events = [event async for event in sampling.stream(ME, TARGET, request(max_tokens=6))]
        assert [event.position for event in events if isinstance(event, SampledToken)] == [0, 1, 2, 3, 4, 5]
        assert isinstance(events[-1], SampleFinished)
        assert engine.requests == deaths + 1

    engine = dying(tmp_path, deaths=deaths)
    play(tmp_path, story, engine)


def test_kept_tokens_are_told_together_to_whoever_wants_them_so_and_each_once_where_the_engine_comes_back(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream = sampling.stream(ME, TARGET, request(max_tokens=3, drafts=((100, 101, 102),)))
        first, rest, end = [event async for event in stream.together]
        assert isinstance(first, KeptTokens)
        assert isinstance(rest, KeptTokens)
        assert (first.position, first.tokens, rest.position, rest.tokens, rest.logprobs) == (0, (100, 101), 2, (102,), (-1.0,))
        assert isinstance(end, SampleFinished)
        assert engine.begun == [(), ((100,),)]
        assert metric(sampling, "bloomery:draft_tokens_kept_total") == metric(sampling, "vllm:generation_tokens_total") == 3

    engine = KeepingEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


def test_kept_tokens_come_one_by_one_to_whoever_reads_tokens(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream = sampling.stream(ME, TARGET, request(max_tokens=3, drafts=((100, 101, 102),)))
        first = await anext(stream)
        assert isinstance(first, SampledToken)
        assert (first.position, first.token, first.kept, stream.more) == (0, 100, True, True)
        assert await tokens_of(stream) == [101, 102]

    play(tmp_path, story, KeepingEngine(tmp_path / "s", Blobs(tmp_path / "blobs")))


def test_an_engine_that_comes_back_with_other_kept_tokens_is_not_mixed_in(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        with pytest.raises(Unavailable, match="answers differently"):
            await tokens_of(sampling.stream(ME, TARGET, request(max_tokens=3, drafts=((100, 101, 102),))))

    play(tmp_path, story, KeepingEngine(tmp_path / "s", Blobs(tmp_path / "blobs"), second=(100, 9, 102)))


def test_a_request_that_kills_every_engine_is_given_up(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        with pytest.raises(Deadly, match=f"went away {MAX_SUBMISSIONS} times"):
            await tokens_of(sampling.stream(ME, TARGET, request()))

    play(tmp_path, story, dying(tmp_path, deaths=100))


def test_half_an_answer_of_an_engine_that_is_not_bit_exact_ends_with_the_engine(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream = sampling.stream(ME, TARGET, request())
        assert [(await anext(stream)).token, (await anext(stream)).token] == [100, 101]  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match=r"--plain.* send the request again"):
            await anext(stream)
        assert engine.requests == 1
        assert await tokens_of(sampling.stream(ME, TARGET, request())) == [100, 101, 102, 103]

    engine = dying(tmp_path, deaths=1)
    engine.bit_exact = False
    play(tmp_path, story, engine)


def test_an_engine_that_comes_back_with_other_numbers_is_not_mixed_in(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream = sampling.stream(ME, TARGET, request())
        assert [(await anext(stream)).token, (await anext(stream)).token] == [100, 101]  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="answers differently"):
            await anext(stream)

    play(tmp_path, story, dying(tmp_path, deaths=1, shift=1))


def test_closing_a_stream_aborts_it_in_the_engine(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        async with aclosing(sampling.stream(ME, TARGET, request(ENDLESS))) as stream:
            await anext(stream)
            assert engine.aborted == []
        await until(lambda: engine.aborted != [])
        (asked,) = engine.sampled
        assert engine.aborted == [Abort(request_id=asked.request_id)]

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


def test_one_sample_can_be_aborted_and_stays_aborted_after_a_restart(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream: SampleStream = sampling.stream(ME, TARGET, request(ENDLESS, num_samples=2, max_tokens=3))
        for _ in range(4):
            await anext(stream)
        stream.abort(1)
        await until(lambda: [abort.sample for abort in engine.aborted] == [1])
        following = asyncio.ensure_future(anext(stream))
        engine.hang_up()
        await until(lambda: [abort.sample for abort in engine.aborted] == [1, 1])
        assert engine.aborted[0].request_id != engine.aborted[1].request_id
        following.cancel()
        await asyncio.wait({following})

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


@pytest.mark.parametrize("place", [0, 2])
def test_a_token_of_another_version_than_was_asked_for_ends_the_answer_and_both_are_named(tmp_path: Path, place: int) -> None:
    async def story(sampling: Sampling) -> None:
        engine.versions_said = {0: BASE}
        assert await tokens_of(sampling.stream(ME, TARGET, request())) == [100, 101, 102, 103]
        engine.versions_said[place] = "another"
        stream = sampling.stream(ME, TARGET, request())
        for position in range(place):
            assert (await anext(stream)).token == 100 + position  # type: ignore[union-attr]
        with pytest.raises(Corrupt, match=rf"version `{BASE}` was asked for, and whoever samples says version `another` of token {place}"):
            await anext(stream)
        await until(lambda: engine.aborted != [])

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


@pytest.mark.parametrize(
    ("category", "code", "kind"),
    [
        ("server", "corrupt", Corrupt),
        ("server", "unavailable", Unavailable),
        ("server", "worker", WorkerError),
        ("server", "of another day", WorkerError),
        ("server", "invalid", WorkerError),
        ("user", "invalid", InvalidInput),
        ("user", "conflict", Conflict),
        ("user", "worker", InvalidInput),
    ],
)
def test_why_a_process_fails_a_request_is_raised_as_what_it_was(tmp_path: Path, category: Category, code: str, kind: type[BloomeryError]) -> None:
    async def story(sampling: Sampling) -> None:
        engine.refuse_to_sample = category, code
        with pytest.raises(BloomeryError, match="it cannot be served") as raised:
            await tokens_of(sampling.stream(ME, TARGET, request()))
        assert (type(raised.value), raised.value.category, raised.value.field) == (kind, category, "prompt")

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


def test_weights_that_are_not_what_was_published_are_corrupt_over_http_too(tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client() as client:
        server.engine.refuse_to_sample = "server", "corrupt"
        with pytest.raises(Corrupt, match="it cannot be served"):
            client.chat("tiny", [{"role": "user", "content": "Hello"}], max_tokens=2)
        answer = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["type"]) == (500, "corrupt", "server_error")
        # The Training API tells whose error it was, and no code.
        with pytest.raises(WorkerError, match="it cannot be served"):
            client.sampler("tiny").sample([5, 6], max_tokens=2, seed=1).result()


def test_names_resolve_in_order_and_need_the_scope(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        assert await sampling.resolve(ME, "tiny") == TARGET
        assert (await sampling.resolve(ME, BASE)).display == BASE
        with pytest.raises(NotFound, match="`tiny`") as unknown:
            await sampling.resolve(ME, "nobody")
        assert unknown.value.field == "model"
        with pytest.raises(Forbidden):
            await sampling.resolve(ME._replace(scopes=frozenset({"read"})), "tiny")

    play(tmp_path, story)


def test_a_bad_request_is_refused_before_the_stream_begins(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        with pytest.raises(InvalidInput):
            sampling.stream(ME, TARGET, request(()))
        with pytest.raises(NotFound):
            sampling.stream(ME, TARGET._replace(base_hash="other"), request())

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (300,)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": (1,) * 64}, "prompt"),
        ({"prompt": (1,) * 65, "max_tokens": 0}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"num_samples": 0}, "num_samples"),
        ({"top_logprobs": 301}, "top_logprobs"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"scored_from": 0}, "scored_from"),
        ({"scored_from": 3}, "scored_from"),
        ({"prompt_draws": -1}, "prompt_draws"),
        ({"prompt_draws": (1 << 22) + 1}, "prompt_draws"),
        ({"num_samples": 1024, "max_tokens": 1 << 20, "top_logprobs": 300}, "top_logprobs"),
        ({"routing": True}, "routing"),
        ({"routing_weights": True}, "routing_weights"),
        ({"drafts": ((1,), (2,))}, "drafts"),
        ({"drafts": ((300,),), "max_tokens": 1}, "drafts"),
        ({"drafts": ((1, -1),), "max_tokens": 2}, "drafts"),
        ({"drafts": ((1,) * 63,), "max_tokens": 100}, "drafts"),
        ({"targets": targets((), ())}, "targets"),
        ({"targets": targets((0,), (1,))}, "targets"),
        ({"targets": targets((2,), (1,))}, "targets"),
        ({"targets": targets((1, 1), (1, 300))}, "targets"),
        ({"targets": targets((1,), (-1,))}, "targets"),
        ({"targets": targets((1, 1), (1,))}, "targets"),
        ({"prompt": (1, 2, 3), "targets": targets((2, 1), (1, 1))}, "targets"),
    ],
)
def test_the_field_at_fault_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_generate(request(**changes), Size(context=64, vocab_size=300, width=64))
    assert refused.value.field == field


def test_drafts_are_bounded_together() -> None:
    size, one = Size(context=1 << 20, vocab_size=300, width=64), (1,) * 4096
    check_generate(request(num_samples=1024, max_tokens=4096, drafts=(one,) * 1024), size)
    with pytest.raises(InvalidInput, match="are 4194305 tokens in all, at most 4194304") as refused:
        check_generate(request(num_samples=1024, max_tokens=4097, drafts=((1, *one),) + (one,) * 1023), size)
    assert refused.value.field == "drafts"


def test_a_prompt_may_fill_the_context_when_it_is_only_scored() -> None:
    check_generate(request((1,) * 64, max_tokens=0), Size(context=64, vocab_size=300, width=64))
    check_generate(request((1,) * 63, max_tokens=1000), Size(context=64, vocab_size=300, width=64))


def test_no_more_of_a_routing_is_told_than_may_be_given_back() -> None:
    size = Size(context=1 << 20, vocab_size=300, width=64, routing=RoutingShape(sparse_layers=tuple(range(32)), top_k=8, experts=64))
    tokens = MAX_EXPERTS_TOLD // (32 * 8)
    check_generate(request(max_tokens=tokens - 2, routing=True), size)
    check_generate(request(max_tokens=tokens - 1), size)
    check_generate(request(max_tokens=tokens // 2 - 2, routing=True, routing_weights=True), size)
    for more in (
        {"max_tokens": tokens - 1},
        {"max_tokens": tokens // 2, "num_samples": 2},
        {"max_tokens": tokens // 2 - 1, "routing_weights": True},
    ):
        with pytest.raises(InvalidInput, match="ask for fewer") as refused:
            check_generate(request(**more, routing=True), size)
        assert refused.value.field == "routing"


def test_weights_are_told_beside_experts_alone() -> None:
    size = Size(context=64, vocab_size=300, width=64, routing=RoutingShape(sparse_layers=(1,), top_k=2, experts=4))
    with pytest.raises(InvalidInput, match="ask for the routing too"):
        check_generate(request(routing_weights=True), size)


def test_a_routing_is_told_once_whatever_happens_to_the_engine(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        group = sampling._fleet.group(BASE, production=False)
        assert group is not None
        asked = request(max_tokens=6, routing=True)
        events = [event async for event in SampleStream(group, asked, lambda: sampling._meters.request(BASE, asked, bounded=False))]
        assert [type(event) for event in events] == [PromptRouted, *[SampledToken] * 6, SampleFinished]
        assert engine.requests == 3

    engine = dying(tmp_path, deaths=2)
    play(tmp_path, story, engine)


def test_seeds_are_kept_or_drawn() -> None:
    assert draw_seed(7) == 7
    assert 0 <= draw_seed(None) < 1 << 53
    assert draw_seed(None) != draw_seed(None)


def test_what_the_engine_had_of_a_prompt_is_known_before_the_first_token(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        engine.found_tokens = 1
        stream = sampling.stream(ME, TARGET, request())
        assert stream.found_tokens == 0
        assert isinstance(await anext(stream), SampledToken)
        assert stream.found_tokens == 1
        await stream.aclose()

    engine = FakeEngine(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)


def test_repeated_prompt_scores_are_passed_on_once(tmp_path: Path) -> None:
    async def story(sampling: Sampling) -> None:
        stream = sampling.stream(ME, TARGET, request(ENDLESS, prompt_logprobs=True, max_tokens=2))
        assert isinstance(await anext(stream), PromptScored)
        assert isinstance(await anext(stream), SampledToken)
        following = asyncio.ensure_future(anext(stream))
        engine.hang_up()
        await until(lambda: engine.seen > 1)
        engine.finish()
        assert isinstance(await following, SampleFinished)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    class Watched(FakeEngine):
        seen = 0
        last = ""

        def _sample(self, generate: Generate) -> None:
            self.seen, self.last = self.seen + 1, generate.request_id
            super()._sample(generate)

        def finish(self) -> None:
            self._post(SamplerEvents(events=(SampleFinished(request_id=self.last, sample=0, reason="length"),)))

    engine = Watched(tmp_path / "s", Blobs(tmp_path / "blobs"))
    play(tmp_path, story, engine)
