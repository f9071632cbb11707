"""kill -9 of replicas and of the engine, replicas that stand still, and promotions, in the middle of streams: each ends with the texts, and the
log-probabilities of all tokens, that its version, seed and options stand for.

What should come is sampled first, by the engine, from each snapshot under its version: nobody is killed then.
"""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import openai
import pytest
from openai.types import CompletionChoice

from bloomery.client import Client
from bloomery.recipes.sft import datum
from tests.live import LiveServer, running_server

STREAMS = 240
AT_ONCE = 12
TOKENS = 64
LONG = 200
"""Tokens of streams that something is to happen to."""
GOES_ON = {"ignore_eos": True}
NUMBERS = {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 100}}, "required": ["numbers"]}
"""What takes more tokens than there are."""
Door = Literal["completions", "chat", "responses"]
OPTIONS: list[tuple[Door, dict[str, Any]]] = [
    ("completions", {"extra_body": GOES_ON}),
    ("completions", {"top_p": 0.9, "frequency_penalty": 0.5, "extra_body": GOES_ON}),
    ("completions", {"extra_body": {**GOES_ON, "structured_outputs": {"regex": "[a-z_ ]{48,}"}}}),
    ("completions", {"n": 2, "extra_body": GOES_ON}),
    ("chat", {"extra_body": GOES_ON}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS}}}),
]
"""In turn, by the seed of a question."""
PROMOTIONS = 3
PROMPTS = ["import os", "def main():", "class Tree:", "for line in", "return self.", "x = [", '"""Read', "if not"]
NAME = "served"
DEADLINE_S = 900.0
RESTARTED_S = 120.0

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


class Text(NamedTuple):
    """One sample, with the log-probability of each of its tokens."""

    text: str
    logprobs: tuple[float, ...]


Texts = tuple[Text, ...]
"""All samples of an answer."""


class Piece(NamedTuple):
    """A part of one sample, or all of it."""

    index: int
    text: str
    logprobs: tuple[float, ...]


class Said(NamedTuple):
    """What a stream gave."""

    version: str
    texts: Texts


class Chaos:
    """Kills and promotes at random moments, while streams are open; the next kill comes when everybody is back."""

    def __init__(self, server: LiveServer, client: Client, versions: Sequence[str], *, victims: Sequence[str]) -> None:
        self.server, self.client, self.versions, self.victims = server, client, versions, victims
        self.open_streams = 0
        self.kills = 0
        self.promotions = 0

    async def rage(self, chance: random.Random) -> None:
        while True:
            await until(lambda: self.open_streams > 0 and self._all_ready())
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            self.promotions += 1
            await asyncio.to_thread(self.client.deployments.promote, NAME, self.versions[self.promotions % 2])
            # Meanwhile one may have died of itself, as one does that is silent for too long on a busy machine.
            victims = chance.sample(self.victims, chance.randint(1, len(self.victims)))
            await self._until_at_work(victims)
            await self._kill(victims)

    async def _until_at_work(self, names: Sequence[str]) -> None:
        """Everybody is back, and each of these that serves has streams of its own in hand, as it said last: an engine serves none of them."""
        async with asyncio.timeout(RESTARTED_S):
            while not (self.open_streams > 0 and self._all_ready() and await self._in_hand(names)):
                await asyncio.sleep(0.02)

    async def _in_hand(self, names: Sequence[str]) -> bool:
        status = await asyncio.to_thread(self.client.status)
        return all(replica.detail.get("running_sequences", 0) > 0 for replica in status.replicas if replica.name in names)

    async def _kill(self, names: Sequence[str]) -> None:
        before = {name: self.server.pid(name) for name in names}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        self.kills += len(names)
        await until(lambda: all(self.server.pids().get(name, pid) != pid for name, pid in before.items()))

    def _all_ready(self) -> bool:
        children = self.server.children()
        return all(children[name]["state"] == "ready" for name in self.victims)


@pytest.mark.slow
@pytest.mark.parametrize(("victims", "kills"), [(["replica-bloomery-tiny-0", "replica-bloomery-tiny-1"], 6), (["engine-bloomery-tiny"], 3)])
def test_no_stream_fails_and_none_says_anything_else_when_processes_die_and_weights_change(victims: list[str], kills: int, tmp_path: Path) -> None:
    with running_server(tmp_path / "data", replicas=2) as server, Client(server.url, server.key, patience_s=60) as client:
        versions = two_versions(client)
        client.deployments.create(NAME, versions[0])
        chaos = Chaos(server, client, versions, victims=victims)
        assert {replica.name for replica in client.status().replicas} == {f"replica-bloomery-tiny-{number}" for number in range(2)}
        assert asyncio.run(story(server, chaos, kills)) >= STREAMS
    assert chaos.kills >= kills


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_streams_leave_a_replica_that_stands_still_whether_it_goes_on_later_or_never(tmp_path: Path, comes_back: bool) -> None:
    with running_server(tmp_path / "data", replicas=2) as server:
        asyncio.run(standstill(server, "replica-bloomery-tiny-0", comes_back=comes_back))


async def standstill(server: LiveServer, name: str, *, comes_back: bool) -> None:
    async with asyncio.timeout(DEADLINE_S), openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sdk:
        expected = await asyncio.gather(*(texts_with(sdk, prompt, asyncio.Event()) for prompt in PROMPTS))
        pid, streams = server.pid(name), await all_begun(sdk)
        while any(stream.done() for stream in streams):
            # A quick server, or a test that did not get to look: some were over before anybody could stand still.
            assert await asyncio.gather(*streams) == expected
            streams = await all_begun(sdk)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: server.children()[name]["state"] != "ready")
        if comes_back:
            os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*streams) == expected
        await until(lambda: server.children()[name]["state"] == "ready")
        assert (server.pid(name) == pid) is comes_back
        assert await asyncio.gather(*(texts_with(sdk, prompt, asyncio.Event()) for prompt in PROMPTS)) == expected


async def all_begun(sdk: openai.AsyncOpenAI) -> list["asyncio.Task[Texts]"]:
    """A stream for every prompt, each of which has said something."""
    begun = [asyncio.Event() for _ in PROMPTS]
    streams = [asyncio.create_task(texts_with(sdk, prompt, event)) for prompt, event in zip(PROMPTS, begun, strict=True)]
    for event in begun:
        await event.wait()
    return streams


async def texts_with(sdk: openai.AsyncOpenAI, prompt: str, begun: asyncio.Event) -> Texts:
    pieces: list[Piece] = []
    asked = {"prompt": prompt, "seed": 1, "max_tokens": LONG, "logprobs": 1, "extra_body": GOES_ON}
    try:
        async for chunk in await sdk.completions.create(model="bloomery-tiny", stream=True, **asked):
            begun.set()
            pieces += map(piece_of_choice, chunk.choices)
    finally:
        begun.set()
    return texts_of(pieces)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(RESTARTED_S):
        while not condition():
            await asyncio.sleep(0.02)


async def story(server: LiveServer, chaos: Chaos, kills: int) -> int:
    """How many streams there were."""
    async with asyncio.timeout(DEADLINE_S), openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sdk:
        asked = [(prompt, number) for number in range(len(OPTIONS)) for prompt in PROMPTS]
        endless = itertools.cycle(asked)
        questions = [(version, *each) for version in chaos.versions for each in asked]
        places = asyncio.Semaphore(AT_ONCE)
        answers = await asyncio.gather(*(whole(sdk, places, *question) for question in questions))
        expected = dict(zip(questions, answers, strict=True))
        assert_told_apart(expected, chaos.versions, asked)
        said: list[tuple[Texts, Said]] = []

        async def ask_on() -> None:
            while len(said) < STREAMS or chaos.kills < kills or chaos.promotions < PROMOTIONS:
                question = next(endless)
                got = await stream(sdk, chaos, *question)
                said.append((expected[got.version, *question], got))

        async with raging(chaos.rage(random.Random(kills))):
            await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
    assert {got.version for _, got in said} == set(chaos.versions)
    assert [got.texts for _, got in said] == [texts for texts, _ in said]
    return len(said)


def assert_told_apart(expected: Mapping[tuple[str, str, int], Texts], versions: Sequence[str], asked: Sequence[tuple[str, int]]) -> None:
    """Else nobody would notice a stream that the other version went on with, or none."""
    assert all(text.text and len(text.logprobs) == TOKENS for texts in expected.values() for text in texts)
    assert {len(texts) for texts in expected.values()} == {1, 2}
    for options in range(len(OPTIONS)):
        rotated = [each for each in asked if each[1] % len(OPTIONS) == options]
        assert any(len({expected[version, *each] for version in versions}) == len(versions) for each in rotated)


@asynccontextmanager
async def raging(chaos: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Let it rage; what goes wrong with it is this test's failure."""
    task = asyncio.create_task(chaos)
    try:
        yield
    finally:
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def whole(sdk: openai.AsyncOpenAI, places: asyncio.Semaphore, version: str, prompt: str, seed: int) -> Texts:
    door, question = question_of(prompt, seed)
    async with places:
        answer = await ask(sdk, door, model=version, **question)
    assert answer.system_fingerprint == version
    if door == "responses":
        (message,) = answer.output
        return texts_of([piece_of_part(part.text, part.logprobs) for part in message.content])
    return texts_of([piece_of_choice(choice) if door == "completions" else piece_of_turn(choice, choice.message) for choice in answer.choices])


async def stream(sdk: openai.AsyncOpenAI, chaos: Chaos, prompt: str, seed: int) -> Said:
    door, question = question_of(prompt, seed)
    chaos.open_streams += 1
    try:
        parts = [part async for part in await ask(sdk, door, model=NAME, stream=True, **question)]
    finally:
        chaos.open_streams -= 1
    if door == "responses":
        (version,) = {str(event.response.system_fingerprint) for event in parts if hasattr(event, "response")}
        pieces = [piece_of_part(event.delta, event.logprobs) for event in parts if event.type == "response.output_text.delta"]
        assert parts[-1].type == "response.incomplete"
        return Said(version, texts_of(pieces))
    (version,) = {str(chunk.system_fingerprint) for chunk in parts}
    choices = [choice for chunk in parts for choice in chunk.choices]
    return Said(version, texts_of([piece_of_choice(choice) if door == "completions" else piece_of_turn(choice, choice.delta) for choice in choices]))


async def ask(sdk: openai.AsyncOpenAI, door: Door, **question: Any) -> Any:
    creates = {"completions": sdk.completions.create, "chat": sdk.chat.completions.create, "responses": sdk.responses.create}
    return await creates[door](**question)


def question_of(prompt: str, seed: int) -> tuple[Door, dict[str, Any]]:
    door, options = OPTIONS[seed % len(OPTIONS)]
    questions: dict[Door, dict[str, Any]] = {
        "completions": {"prompt": prompt, "seed": seed, "max_tokens": TOKENS, "logprobs": 1},
        "chat": {"messages": [{"role": "user", "content": prompt}], "seed": seed, "max_tokens": TOKENS, "logprobs": True},
        "responses": {
            "input": prompt,
            "max_output_tokens": TOKENS,
            "include": ["message.output_text.logprobs"],
            "extra_body": {"seed": seed},
        },
    }
    return door, questions[door] | options


def piece_of_choice(choice: CompletionChoice) -> Piece:
    return Piece(choice.index, choice.text, () if choice.logprobs is None else tuple(choice.logprobs.token_logprobs or ()))


def piece_of_turn(choice: Any, turn: Any) -> Piece:
    """Of a chat: a message, or what is new of it."""
    return Piece(choice.index, turn.content or "", () if choice.logprobs is None else tuple(token.logprob for token in choice.logprobs.content))


def piece_of_part(text: str, tokens: Any) -> Piece:
    return Piece(0, text, tuple(token.logprob for token in tokens))


def texts_of(pieces: Sequence[Piece]) -> Texts:
    """Of pieces in the order in which they came, or of whole answers."""
    samples: dict[int, list[Piece]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append(piece)
    return tuple(text_of_pieces(samples[index]) for index in sorted(samples))


def text_of_pieces(pieces: Sequence[Piece]) -> Text:
    return Text("".join(piece.text for piece in pieces), tuple(number for piece in pieces for number in piece.logprobs))


def two_versions(client: Client) -> list[str]:
    """Snapshots of a run that sample differently."""
    run = client.create_run("bloomery-tiny", rank=8, seed=1)
    rows = [datum(np.random.default_rng(row).integers(0, 1000, 40).tolist(), [1.0] * 40) for row in range(4)]
    versions = []
    for name in ("first", "second"):
        run.forward_backward(rows)
        run.optim_step(3e-3)
        versions.append(run.save_snapshot(name).result().version)
    return versions
