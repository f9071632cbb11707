"""Rollouts of steps over HTTP, from who records them to who reads them; the engine is a fake."""

import asyncio
import json
import os
import threading
import tracemalloc
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from msgspec import Raw
from msgspec.structs import replace
from sqlalchemy import select

from bloomery.client import Client
from bloomery.config.data_dir import DataDir
from bloomery.render import ChatTokenizer
from bloomery.services.engines.texts import TokenizerTexts
from bloomery.services.training.recorded import pack, unpack
from bloomery.services.training.rollout_texts import START, filtered
from bloomery.services.training.rollout_texts import exported as exported_from
from bloomery.services.training.rollouts import MAX_AHEAD, forget_old
from bloomery.store import rows
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, Corrupt, Forbidden, Gone, InvalidInput, NotFound, NotSupported, TooLarge
from bloomery.types.rollouts import (
    MAX_ATTEMPTS,
    MAX_LEVELS,
    MAX_MESSAGES,
    MAX_MESSAGES_BYTES,
    MAX_SEGMENTS,
    MAX_SPANS,
    MAX_STEP_BYTES,
    RecordedFailure,
    RecordedGroup,
    RecordedRollout,
    RecordedSegment,
    RecordedStep,
    RolloutFilter,
    RolloutGroup,
    fitting,
    packed_messages,
)
from bloomery.types.wire import encode
from tests.api.server import Server, serving

PROMPT, RIGHT, WRONG = "Say “hé 🙂”:", "héé 🙂!", "no 🙃"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client(patience_s=1) as client:
        yield client


@pytest.fixture
def tokenizer(server: Server) -> ChatTokenizer:
    return ChatTokenizer.load(Path(server.config.models[0].path))


def ids(tokens: list[int]) -> Array:
    return Array.of(np.asarray(tokens, np.int32))


def floats(*numbers: float) -> Array:
    return Array.of(np.asarray(numbers, np.float32))


def rollout(tokenizer: ChatTokenizer, name: str, said: str, reward: float, **changes: Any) -> RecordedRollout:
    tokens = [*tokenizer.encode(said), tokenizer.end_tokens[0]]
    count = len(tokens)
    segment = RecordedSegment(
        tokens=ids(tokens),
        sampled=((0, count),),
        logprobs=floats(*(-0.1 * place for place in range(count))),
        advantages=floats(*[2 * reward - 1] * count),
        trained=((1, count),),
        versions=((0, 1, "older"), (1, count, "newest")),
        after_prompt=True,
    )
    return replace(RecordedRollout(id=name, segments=(segment,), stopped=True, reward=reward, parts={"json": 1.0}), **changes)


def recorded(tokenizer: ChatTokenizer) -> RecordedStep:
    """A group that is trained, one whose members are alike, and one that failed."""
    right, wrong = rollout(tokenizer, "0.0", RIGHT, 1.0, reason="says it"), rollout(tokenizer, "0.1", WRONG, 0.0)
    alike = replace(right.segments[0], advantages=None, trained=())
    prompt, messages = ids(tokenizer.encode(PROMPT)), packed_messages([{"role": "user", "content": PROMPT}])
    return RecordedStep(
        groups=(
            RecordedGroup(number=0, problem="a", prompt=prompt, rollouts=(right, wrong), messages=messages),
            RecordedGroup(
                number=1, problem="b", prompt=prompt, rollouts=(replace(right, id="1.0", segments=(alike,), reward=0.25),), dropped="zero_variance"
            ),
            RecordedGroup(
                number=2,
                problem="c",
                prompt=ids([]),
                rollouts=(),
                dropped="too_small",
                failures=(RecordedFailure(id="2.0", kind="raised", message="KeyError: x", final=True),),
            ),
        ),
        left_out=3,
    )


def read(client: Client, run: str, step: int = 1, **filters: Any) -> list[RolloutGroup]:
    return list(client.run(run).rollouts.groups(step, **filters))


def names(groups: list[RolloutGroup]) -> list[list[str]]:
    return [[each.id for each in group.rollouts] for group in groups]


def test_what_was_recorded_is_read_back_with_what_its_tokens_say(client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    made = run.rollouts.add(1, recorded(tokenizer))
    assert (made.run, made.step, made.groups, made.left_out, made.rollouts, made.failures) == (run.id, 1, 3, 3, 3, 1)
    assert (made.reward_mean, made.reward_min, made.reward_max) == (pytest.approx(1.25 / 3), 0.0, 1.0)
    assert run.rollouts.steps() == [made]
    spread = client.run(run.id).rollouts.page(1, limit=1)
    assert spread.rewards is not None
    assert spread.lengths is not None
    assert (spread.rewards.low, spread.rewards.high, sum(spread.rewards.counts), sum(spread.lengths.counts)) == (0.0, 1.0, 3, 3)
    groups = read(client, run.id)
    assert [(group.group, group.problem, group.trained, group.dropped) for group in groups] == [
        (0, "a", True, None),
        (1, "b", False, "zero_variance"),
        (2, "c", False, "too_small"),
    ]
    first, (second,) = groups[0], groups[1].rollouts
    assert first.messages == [{"role": "user", "content": PROMPT}]
    assert first.prompt == PROMPT
    assert first.prompt_texts is not None
    assert "".join(first.prompt_texts) == PROMPT
    said, other = first.rollouts
    (segment,) = said.segments
    count = len(segment.tokens)
    assert (said.answer, said.reason, said.parts, said.reward, said.advantage, said.tokens) == (RIGHT, "says it", {"json": 1.0}, 1.0, 1.0, count)
    assert segment.texts is not None
    assert len(segment.texts) == count
    assert "".join(segment.texts) == segment.text == tokenizer.decode(segment.tokens)
    assert segment.logprobs == np.asarray([-0.1 * place for place in range(count)], np.float32).tolist()
    assert segment.advantages == [1.0] * count
    assert segment.trained == [False] + [True] * (count - 1)
    assert segment.versions == [(0, 1, "older"), (1, count, "newest")]
    assert (other.answer, other.reason) == (WRONG, None)
    assert (second.advantage, second.segments[0].advantages[0], any(second.segments[0].trained)) == (None, None, False)
    assert [failure.message for failure in groups[2].failures] == ["KeyError: x"]


def test_a_turn_of_tools_between_two_answers_is_shown_and_has_no_numbers(client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    parts = [tokenizer.encode(text) for text in ("asked ", "first", " tool says ", "second")]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    sampled = ((ends[0], ends[1]), (ends[2], ends[3]))
    logprobs = floats(*[-0.5] * (len(parts[1]) + len(parts[3])))
    answers = ((*sampled[0], "one"), (*sampled[1], "two"))
    segment = RecordedSegment(
        tokens=ids([token for part in parts for token in part]),
        sampled=sampled,
        logprobs=logprobs,
        advantages=logprobs,
        trained=sampled,
        answers=answers,
    )
    agent = RecordedRollout(id="0.0", segments=(segment,), stopped=False, reward=1.0, turns={"two": 0.5})
    run.rollouts.add(1, RecordedStep(groups=(RecordedGroup(number=0, problem="a", prompt=ids([]), rollouts=(agent,)),)))
    ((shown,),) = [group.rollouts for group in read(client, run.id)]
    assert (shown.answer, shown.turns, shown.segments[0].text) == ("second", {"two": 0.5}, "asked first tool says second")
    assert shown.segments[0].answers == list(answers)
    told = [number is not None for number in shown.segments[0].logprobs]
    assert told == shown.segments[0].sampled == shown.segments[0].trained
    assert told == [False] * ends[0] + [True] * len(parts[1]) + [False] * len(parts[2]) + [True] * len(parts[3])


def test_a_step_is_recorded_once(client: Client, tokenizer: ChatTokenizer) -> None:
    run, step = client.create_run("tiny", 4), recorded(tokenizer)
    made = run.rollouts.add(7, step)
    assert run.rollouts.add(7, step) == made
    with pytest.raises(Conflict, match="other rollouts were recorded for step 7"):
        run.rollouts.add(7, replace(step, left_out=4))
    assert run.rollouts.steps() == [made]
    run.rollouts.add(8, step)
    assert [each.step for each in run.rollouts.steps(order="oldest")] == [7, 8]
    assert [each.step for each in run.rollouts.steps(limit=1)] == [8]


def test_filters_leave_those_rollouts_to_which_all_of_them_apply(client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    run.rollouts.add(1, recorded(tokenizer))
    of = run.id
    assert names(read(client, of, min_reward=0.2)) == [["0.0"], ["1.0"]]
    assert names(read(client, of, min_reward=0.2, max_reward=0.5)) == [["1.0"]]
    assert names(read(client, of, trained=False)) == [["1.0"], []]
    assert names(read(client, of, trained=True, max_reward=0.5)) == [["0.1"]]
    assert names(read(client, of, search="HÉÉ")) == [["0.0"], ["1.0"]]
    assert names(read(client, of, search="SAY")) == [["0.0", "0.1"], ["1.0"]]
    assert names(read(client, of, search="nowhere")) == []
    assert names(read(client, of, group=2)) == [[]]
    pages = [client._http.get(f"/api/v1/runs/{of}/rollouts/1", limit=1, offset=offset) for offset in range(4)]
    assert [([group["group"] for group in page["data"]], page["has_more"]) for page in pages] == [([0], True), ([1], True), ([2], False), ([], False)]


def test_what_is_wrong_with_a_body_is_said(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run, step = client.create_run("tiny", 4), recorded(tokenizer)
    group = step.groups[0]
    segment = group.rollouts[0].segments[0]

    def of(**changes: Any) -> RecordedStep:
        said = replace(group.rollouts[0], segments=(replace(segment, **changes),))
        return RecordedStep(groups=(replace(group, rollouts=(said,)),))

    for broken, why in (
        (of(sampled=((0, 2),)), "2 tokens were sampled"),
        (of(sampled=((0, 999),)), "not spans of places"),
        (of(trained=((3, 4), (1, 2))), "`trained` is not spans"),
        (of(tokens=ids([-1])), "id below 0"),
        (of(logprobs=ids([1])), "give a float32"),
        (RecordedStep(groups=(group, group)), "same number"),
        (RecordedStep(groups=(replace(group, rollouts=(replace(group.rollouts[0], reward=float("nan")),)),)), "not finite"),
        (of(answers=((0, 1, "one"), (1, 1, "two"))), "none of them empty"),
        *((RecordedStep(groups=(replace(group, messages=Raw(encode(said))),)), why) for said, why in WRONG_MESSAGES),
        *((RecordedStep(groups=(replace(group, rollouts=(replace(group.rollouts[0], **far),)),)), "further than 1e[+]100") for far in TOO_FAR),
        (RecordedStep(groups=(replace(group, rollouts=(group.rollouts[0],) * (MAX_ATTEMPTS + 1)),)), "length <= 1024"),
        (RecordedStep(groups=(replace(group, rollouts=(replace(group.rollouts[0], segments=(segment,) * (MAX_SEGMENTS + 1)),)),)), "length <= 4096"),
        (RecordedStep(groups=tuple(replace(group, number=number, rollouts=(many(segment),)) for number in range(5))), "more than 262144 spans"),
    ):
        with pytest.raises(InvalidInput, match=why):
            run.rollouts.add(1, broken)
    large = RecordedStep(groups=(replace(group, prompt=ids([1] * (MAX_STEP_BYTES // 4))),))
    with pytest.raises(TooLarge, match="leave groups out"):
        run.rollouts.add(1, large)
    for content, headers in ((b"\xc1", "application/msgpack"), (encode(step), "application/json")):
        answer = server.http.post(f"/api/v1/runs/{run.id}/rollouts/1", content=content, headers={"content-type": headers})
        assert answer.status_code == 400
    assert run.rollouts.steps() == []


WRONG_MESSAGES: tuple[tuple[Any, str], ...] = (
    ([{"x": b"y"}], "not JSON"),
    ([{"x": float("inf")}], "not JSON"),
    ({"x": 1}, "not JSON"),
    ([[]], "not JSON"),
    ([{}] * (MAX_MESSAGES + 1), "length <= 1024"),
    ([{"x": [{}] * MAX_MESSAGES_BYTES}], "262144 are kept"),
    ([{"x": reduce(lambda inner, _: [inner], range(MAX_LEVELS), [])}], "more than 32 levels"),
)
TOO_FAR: tuple[dict[str, Any], ...] = ({"reward": 1.7e308}, {"parts": {"a": -1.7e308}}, {"turns": {"a": 1.1e100}}, {"reward": float("inf")})


def many(segment: RecordedSegment) -> RecordedRollout:
    """65,536 spans."""
    count = MAX_SPANS
    spans = tuple((place, place + 1, "") for place in range(count))
    numbers = Array.of(np.zeros(count, np.float32))
    long = replace(
        segment,
        tokens=ids([1] * count),
        sampled=((0, count),),
        logprobs=numbers,
        advantages=numbers,
        trained=((0, count),),
        versions=(),
        answers=spans,
    )
    return RecordedRollout(id="long", segments=(long,), stopped=True)


def test_small_bytes_that_are_large_in_memory_are_refused_before_they_are(tokenizer: ChatTokenizer) -> None:
    group = recorded(tokenizer).groups[0]
    none = (8 << 20).to_bytes(4, "big")
    empty = Raw(b"\xdd" + none + b"\x80" * (8 << 20))
    spans = Raw(b"\xdd" + none + b"\x92\x00\x00" * (4 << 20))
    sizes = Raw(b"\xdd" + none + b"\xcc\xff" * (7 << 20))
    bodies = [
        encode({"groups": empty}),
        encode({"groups": [replace(group, messages=empty)]}),
        encode({"groups": [{"number": 0, "problem": "", "prompt": group.prompt, "rollouts": empty}]}),
        encode({"groups": [replace(group, rollouts=(), failures=empty)]}),  # type: ignore[arg-type]
        encode({"groups": [{"number": 0, "problem": "", "prompt": {"dtype": "int32", "data": b"", "shape": sizes}, "rollouts": []}]}),
        encode(
            {"groups": [replace(group, rollouts=(replace(group.rollouts[0], segments=(replace(group.rollouts[0].segments[0], answers=spans),)),))]}
        ),
    ]
    tracemalloc.start()
    try:
        for body in bodies:
            assert len(body) <= MAX_STEP_BYTES
            tracemalloc.reset_peak()
            with pytest.raises(InvalidInput):
                pack(body)
            assert tracemalloc.get_traced_memory()[1] < 2 * MAX_STEP_BYTES
    finally:
        tracemalloc.stop()


def test_of_a_body_that_does_not_say_its_length_no_more_is_read_than_is_kept(server: Server, client: Client) -> None:
    parts = (bytes(1 << 20) for _ in range((MAX_STEP_BYTES >> 20) + 1))
    path = f"/api/v1/runs/{client.create_run('tiny', 4).id}/rollouts/1"
    answer = server.http.post(path, content=parts, headers={"content-type": "application/msgpack"})
    assert (answer.status_code, "over the limit of 16 MiB: leave groups out" in answer.text) == (413, True)


def test_a_blob_that_says_it_is_larger_than_any_step_is_damaged() -> None:
    huge = zstandard.compress(bytes(2 * MAX_STEP_BYTES + 1))
    for blob in (huge, b"", b"no frame", huge[:6]):
        with pytest.raises(Corrupt):
            unpack(blob, "")
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="it says that it has more"):
            unpack(huge, "")
        assert tracemalloc.get_traced_memory()[1] < MAX_STEP_BYTES
    finally:
        tracemalloc.stop()


def test_a_page_ends_before_its_messages_are_too_many(client: Client, tokenizer: ChatTokenizer) -> None:
    run, group = client.create_run("tiny", 4), recorded(tokenizer).groups[0]
    said = packed_messages([{"role": "user", "content": "x" * (MAX_MESSAGES_BYTES // 2)}])
    run.rollouts.add(1, RecordedStep(groups=tuple(replace(group, number=number, messages=said) for number in range(3))))
    page = client._http.get(f"/api/v1/runs/{run.id}/rollouts/1")
    assert ([each["group"] for each in page["data"]], page["has_more"]) == ([0], True)
    assert [each.group for each in read(client, run.id)] == [0, 1, 2]


def test_groups_without_room_are_counted(tokenizer: ChatTokenizer) -> None:
    group = recorded(tokenizer).groups[0]
    large = replace(group, number=1, prompt=ids([1] * 1000))
    fitted = fitting([group, large, replace(group, number=2)], 3 * len(encode(group)))
    assert ([each.number for each in fitted.groups], fitted.left_out) == ([0, 2], 1)
    assert len(encode(fitted)) <= 3 * len(encode(group))


def test_a_step_far_beyond_all_that_its_run_has_had_is_refused(client: Client) -> None:
    run, step = client.create_run("tiny", 4), RecordedStep(groups=())
    with pytest.raises(InvalidInput, match=f"has had 0 operations, and its newest recorded step is 0: step {MAX_AHEAD + 1} is none of it yet"):
        run.rollouts.add(MAX_AHEAD + 1, step)
    assert run.rollouts.steps() == []
    # Rounds of which none trained, from the first on or behind one that was recorded.
    run.rollouts.add(MAX_AHEAD, step)
    run.rollouts.add(2 * MAX_AHEAD, step)
    with pytest.raises(InvalidInput, match=f"its newest recorded step is {2 * MAX_AHEAD}:"):
        run.rollouts.add(3 * MAX_AHEAD + 1, step)
    trained = client.create_run("tiny", 4)
    trained.save_snapshot().result()
    trained.rollouts.add(MAX_AHEAD + 1, step)
    assert [each.step for each in trained.rollouts.steps()] == [MAX_AHEAD + 1]


def test_an_export_has_a_line_for_each_rollout_and_says_what_cannot_be_read(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    for step in (1, 2, 3):
        run.rollouts.add(step, recorded(tokenizer))
    blob_of(server, 2).unlink()
    lines = exported(server, run.id)
    assert [(line["step"], line.get("id")) for line in lines if line["step"] != 2] == [
        (step, name) for step in (1, 3) for name in ("0.0", "0.1", "1.0")
    ]
    (broken,) = [line for line in lines if line["step"] == 2]
    assert "not there any more" in broken["error"]
    first = lines[0]
    assert (first["prompt"], first["answer"], first["reward"], first["messages"]) == (PROMPT, RIGHT, 1.0, [{"role": "user", "content": PROMPT}])
    assert [line["id"] for line in exported(server, run.id, **{"from": 3, "to": 9, "min_reward": 0.5})] == ["0.0"]


def test_an_export_that_is_made_piece_by_piece_has_every_rollout_once(tokenizer: ChatTokenizer) -> None:
    group, texts = recorded(tokenizer).groups[0], TokenizerTexts(tokenizer)
    long = replace(many(group.rollouts[0].segments[0]), reward=0.5)
    rollouts = tuple(replace(long, id=str(place)) for place in range(3))
    step = RecordedStep(groups=(group, replace(group, number=1, rollouts=rollouts), replace(group, number=2, rollouts=(long, *group.rollouts))))
    for wanted in (RolloutFilter(), RolloutFilter(max_reward=0.5)):
        place, found, pieces = START, list[tuple[int, str]](), 0
        while place is not None:
            some = exported_from(step, wanted, texts, place)
            found += [(each["group"], each["id"]) for each in some.rollouts]
            place, pieces = some.next, pieces + 1
        assert found == [(each.number, rollout.id) for each in filtered(step, wanted, texts) for rollout in each.rollouts]
        assert pieces > 2


def test_no_more_steps_are_in_memory_than_there_are_turns_whoever_hangs_up(server: Server) -> None:
    rollouts, most, now, lock, going = server.services.rollouts, 0, 0, threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        going.wait(30)
        with lock:
            now -= 1

    async def ask() -> None:
        asking = [asyncio.ensure_future(rollouts._in_turn(work)) for _ in range(6)]
        async with asyncio.timeout(30):
            while now < 2:
                await asyncio.sleep(0)
        for each in asking[:2]:
            each.cancel()
        await asyncio.wait(asking[:2])
        assert rollouts._turns.locked()
        going.set()
        await asyncio.gather(*asking[2:])

    server.call(ask())
    assert most == 2


def test_a_step_that_cannot_be_shown_is_a_line_of_an_export(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run, step = client.create_run("tiny", 4), recorded(tokenizer)
    run.rollouts.add(1, step)
    run.rollouts.add(2, step)
    deep = Raw(encode([{"x": reduce(lambda inner, _: [inner], range(260), [])}]))
    plain = encode(RecordedStep(groups=(replace(step.groups[0], messages=deep),)))
    blob_of(server, 1).write_bytes(zstandard.compress(plain))
    digest = blake3(plain).hexdigest()

    async def change() -> None:
        work = rows.rollout_step.update().values(hash=digest).where(rows.rollout_step.c.step == 1)
        await server.services._database.write(lambda connection: connection.execute(work))

    server.call(change())
    broken, *others = exported(server, run.id)
    assert ("cannot be shown" in broken["error"], [line["id"] for line in others]) == (True, ["0.0", "0.1", "1.0"])
    with pytest.raises(Corrupt, match="cannot be shown"):
        read(client, run.id, 1)


def test_what_is_shown_can_be_sent_to_a_data_set(client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    run.rollouts.add(1, recorded(tokenizer))
    group = read(client, run.id, min_reward=0.5)[0]
    assert group.messages is not None
    conversation = [*group.messages, {"role": "assistant", "content": group.rollouts[0].answer}]
    client.datasets.create("good")
    made = client.datasets.add_version("good", {"train": json.dumps({"messages": conversation})})
    (row,) = client.datasets.rows("good", made.id, "train")
    assert row.model_dump()["messages"][-1]["content"] == RIGHT


def test_a_blob_that_is_gone_or_damaged_is_said_and_the_others_are_read(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    for step in (1, 2, 3, 4):
        run.rollouts.add(step, recorded(tokenizer))
    blob_of(server, 1).unlink()
    whole = blob_of(server, 2).read_bytes()
    blob_of(server, 2).write_bytes(whole[:-9])
    blob_of(server, 3).write_bytes(blob_of(server, 4).read_bytes()[:20] + os.urandom(200))
    with pytest.raises(Gone, match=r"blob `rollouts/.*` is missing"):
        read(client, run.id, 1)
    for step in (2, 3):
        with pytest.raises(Corrupt, match=f"rollouts of step {step} of run .* are damaged"):
            read(client, run.id, step)
    assert names(read(client, run.id, 4)) == [["0.0", "0.1"], ["1.0"], []]
    with pytest.raises(NotFound, match="no rollouts of step 5"):
        read(client, run.id, 5)


def test_the_newest_steps_stay_and_of_those_before_every_tenth(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run, other = client.create_run("tiny", 4), client.create_run("tiny", 4)
    for step in range(1, 26):
        run.rollouts.add(step, RecordedStep(groups=(), left_out=step))
    other.rollouts.add(1, recorded(tokenizer))
    server.services.garbage._keep_rollouts = 3
    server.call(server.services.garbage.expire())
    assert [each.step for each in run.rollouts.steps(order="oldest")] == [10, 20, 23, 24, 25]
    assert [each.step for each in other.rollouts.steps()] == [1]
    assert client.collect_garbage().blobs == 0
    everything = server.services.garbage._sweep(1 << 62)
    server.call(everything)
    assert len(list(DataDir(Path(server.config.data_dir)).blobs.glob("rollouts/*/*"))) == 6


def test_of_a_run_that_is_too_large_the_oldest_steps_go_and_only_of_one_that_grew(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    made = [run.rollouts.add(step, recorded(tokenizer)) for step in (10, 20, 30, 31)]

    def forget(**how: Any) -> list[int]:
        server.call(server.services._database.write(lambda connection: forget_old(connection, 2, **how)))
        return [each.step for each in run.rollouts.steps(order="oldest")]

    two = made[2].size_bytes + made[3].size_bytes
    assert forget() == [10, 20, 30, 31]
    assert forget(since_us=made[3].created_us + 1, most_bytes=two) == [10, 20, 30, 31]
    assert forget(since_us=made[3].created_us, most_bytes=two) == [30, 31]


def test_who_repeats_a_step_whose_blob_is_gone_has_it_again(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    made = run.rollouts.add(1, recorded(tokenizer))
    blob_of(server, 1).unlink()
    assert run.rollouts.add(1, recorded(tokenizer)) == made
    assert len(read(client, run.id)) == 3


def test_who_wants_no_texts_kept_has_no_rollouts_kept(tmp_path: Path) -> None:
    with serving(tmp_path, record="metadata") as server, server.client(patience_s=1) as client:
        run = client.create_run("tiny", 4)
        with pytest.raises(NotSupported, match="`--record metadata`"):
            run.rollouts.add(1, RecordedStep(groups=()))
        assert run.rollouts.steps() == []


def test_who_reads_needs_no_key_that_trains(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    run.rollouts.add(1, recorded(tokenizer))
    reads = Client("http://server", client.keys.create("reads", ["read"]).key, transport=server.transport)
    assert len(read(reads, run.id)) == 3
    with pytest.raises(Forbidden):
        reads.run(run.id).rollouts.add(2, RecordedStep(groups=()))


def test_of_a_base_that_is_served_no_more_the_tokens_are_shown(server: Server, client: Client, tokenizer: ChatTokenizer) -> None:
    run = client.create_run("tiny", 4)
    run.rollouts.add(1, recorded(tokenizer))

    async def leave() -> None:
        work = rows.run.update().values(base_hash="another")
        await server.services._database.write(lambda connection: connection.execute(work))

    server.call(leave())
    (group, *_) = read(client, run.id)
    assert (group.prompt, group.prompt_texts, group.rollouts[0].answer, group.rollouts[0].segments[0].text) == (None,) * 4
    assert group.prompt_tokens == tokenizer.encode(PROMPT)


def exported(server: Server, run: str, **query: Any) -> list[dict[str, Any]]:
    answer = server.http.get(f"/api/v1/runs/{run}/rollouts/export", params=query)
    assert answer.headers["content-type"] == "application/jsonl"
    return [json.loads(line) for line in answer.text.splitlines()]


def blob_of(server: Server, step: int) -> Path:
    query = select(rows.rollout_step.c.key).where(rows.rollout_step.c.step == step)

    async def find() -> str:
        return await server.services._database.read(lambda connection: str(connection.scalar(query)))

    return DataDir(Path(server.config.data_dir)).blobs / server.call(find())
