"""What is recorded, what never is, and what judgements attach to."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bloomery.services.access.principal import Principal
from bloomery.services.data.span_filter import SpanFilter
from bloomery.services.data.span_rows import RecordedSample
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.resources import GiveFeedback, Price
from tests.services.stage import BASE, ME, STRANGER, Stage, chat, play

SECRET = "ada@example.com"


def everything_on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_a_span_is_complete(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1", "What?", "This.", episode_id="episode-1", tags={"team": "blue"}))
        span = await stage.traffic.get(ME, "chatcmpl-1")
        assert (span.version, span.base_hash, span.template_hash, span.model) == (BASE, BASE, "t", "tiny")
        assert (span.in_tokens, span.out_tokens, span.seed, span.finish_reason) == (3, 2, 7, "stop")
        assert (span.episode_id, span.tags, span.consent, span.redacted) == ("episode-1", {"team": "blue"}, "train", False)
        assert span.retention_until_us == span.started_us + 30 * 86_400_000_000
        body = await stage.traffic.body(ME, "chatcmpl-1")
        assert body is not None
        assert body["request"]["messages"] == [{"role": "user", "content": "What?"}]
        assert body["choices"][0]["message"]["content"] == "This."
        assert body["tokens"] == {"prompt": [1, 2, 3], "samples": [{"tokens": [4, 5], "logprobs": [-0.25, None], "finish_reason": "stop"}]}

    play(tmp_path, story)


def test_secrets_reach_neither_rows_nor_bodies_nor_token_ids(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        spelled = [{"token": letter} for letter in SECRET]
        choice = {"message": {"role": "assistant", "content": f"It is {SECRET}"}, "finish_reason": "stop", "logprobs": {"content": spelled}}
        stage.traffic.record(chat("chatcmpl-1", choices=[choice], episode_id=SECRET, session_id=SECRET, tags={"user": SECRET}))
        span = await stage.traffic.get(ME, "chatcmpl-1")
        assert span.redacted
        assert span.tags == {"user": "[email]"}
        body = await stage.traffic.body(ME, "chatcmpl-1")
        assert body is not None
        assert body["tokens"] is None
        assert body["choices"] == [{"message": {"role": "assistant", "content": "It is [email]"}, "finish_reason": "stop"}]
        given = await stage.feedback.give(ME, GiveFeedback(target=SECRET, metric="note", type="comment", value=f"ask {SECRET}", author=SECRET))
        assert (given.target_kind, given.value) == ("episode", "ask [email]")

    play(tmp_path, story)
    assert SECRET.encode() not in everything_on_disk(tmp_path)


def test_metadata_mode_keeps_no_text_and_off_keeps_nothing(tmp_path: Path) -> None:
    async def metadata(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1", "confidential question"))
        span = await stage.traffic.get(ME, "chatcmpl-1")
        assert (span.has_body, span.input_hash, span.in_tokens, span.seed) == (False, None, 3, 7)
        assert await stage.traffic.body(ME, "chatcmpl-1") is None

    async def off(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1"))
        assert (await stage.traffic.list(ME)).data == []
        with pytest.raises(Conflict, match="records no traffic"):
            await stage.feedback.give(ME, GiveFeedback(target="chatcmpl-1", metric="helpful", value=True))

    for name, story in {"metadata": metadata, "off": off}.items():
        directory = tmp_path / name
        directory.mkdir()
        play(directory, story, mode=name)
    assert b"confidential question" not in everything_on_disk(tmp_path)


def test_a_full_queue_drops_and_counts_instead_of_waiting(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for number in range(5):  # no await in between: the writer cannot run
            stage.traffic.record(chat(f"chatcmpl-{number}"))
        assert stage.traffic.state().dropped == 3
        assert len((await stage.traffic.list(ME)).data) == 2
        assert stage.traffic.state().recorded == 2

    play(tmp_path, story, capacity=2)


def test_a_span_that_cannot_be_written_costs_itself_only(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for span_id in ("chatcmpl-1", "chatcmpl-2", "chatcmpl-1"):  # the second of an id violates the primary key
            stage.traffic.record(chat(span_id))
        assert {span.id for span in (await stage.traffic.list(ME)).data} == {"chatcmpl-1", "chatcmpl-2"}
        assert (stage.traffic.state().recorded, stage.traffic.state().failed) == (2, 1)

    play(tmp_path, story)


def test_what_was_recorded_before_a_clean_stop_is_there_afterwards(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        for number in range(300):
            stage.traffic.record(chat(f"chatcmpl-{number}", started_us=number))

    async def second(stage: Stage) -> None:
        page = await stage.traffic.list(ME, limit=200, offset=200)
        assert ([span.started_us for span in page.data], page.has_more) == (list(range(99, -1, -1)), False)

    play(tmp_path, first)
    play(tmp_path, second)


def test_a_request_costs_what_its_deployment_asked_for_when_it_came(tmp_path: Path) -> None:
    price = Price(prompt_usd_per_mtok=8.0, cached_prompt_usd_per_mtok=2.0, completion_usd_per_mtok=32.0)

    async def story(stage: Stage) -> None:
        await stage.deployments.create(ME, "router", "tiny", {})

        async def ask(span_id: str, **fields: Any) -> None:
            target = await stage.deployments.target(ME, "router")
            assert target is not None
            stage.traffic.record(chat(span_id, target=target, **fields))

        await ask("chatcmpl-1", started_us=1)
        assert (await stage.deployments.set_price(ME, "router", price)).price == price
        await ask("chatcmpl-2", started_us=2, cached_tokens=2, duration_us=3_000_000)
        await ask("chatcmpl-3", started_us=3, status="error", duration_us=2_000_000)
        await (reopened := stage.deployments).load()
        assert (await reopened.get(ME, "router")).price == price
        assert (await stage.deployments.set_price(ME, "router", None)).price is None
        await ask("chatcmpl-4", started_us=4)
        stage.traffic.record(chat("chatcmpl-5", started_us=5))
        # Of three tokens of a prompt two were computed before, and two are answered: 8 + 2 * 2 + 2 * 32, and 3 * 8 + 2 * 32.
        costs = {span.id: span.cost_usd for span in (await stage.traffic.list(ME)).data}
        assert costs == {"chatcmpl-1": None, "chatcmpl-2": 76e-6, "chatcmpl-3": 88e-6, "chatcmpl-4": None, "chatcmpl-5": None}
        assert [span.id for span in (await stage.traffic.list(ME, order="dearest")).data] == ["chatcmpl-3", "chatcmpl-2"]
        assert [span.id for span in (await stage.traffic.list(ME, order="slowest", limit=2)).data] == ["chatcmpl-2", "chatcmpl-3"]
        assert [span.id for span in (await stage.traffic.list(ME, SpanFilter(min_cost_usd=80e-6))).data] == ["chatcmpl-3"]
        assert [span.id for span in (await stage.traffic.list(ME, SpanFilter(status="error", version=BASE))).data] == ["chatcmpl-3"]
        report = await stage.traffic.totals(ME)
        assert (report.total.requests, report.total.errors, report.total.in_tokens, report.total.cached_tokens) == (5, 1, 15, 2)
        assert (report.total.out_tokens, report.total.priced, report.total.cost_usd) == (10, 2, 164e-6)
        assert [(each.deployment, each.requests, each.priced) for each in report.deployments] == [("router", 4, 2), (None, 1, 0)]
        assert (await stage.traffic.totals(ME, SpanFilter(since_us=5))).total.cost_usd is None
        assert (await stage.traffic.totals(STRANGER)).total.requests == 0

    play(tmp_path, story)


def test_lists_are_filtered_and_confined_to_the_project(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.deployments.create(ME, "router", "tiny", {})
        target = await stage.deployments.target(ME, "router")
        assert target is not None
        stage.traffic.record(chat("chatcmpl-1", target=target, started_us=10, episode_id="e"))
        stage.traffic.record(chat("chatcmpl-2", started_us=20))

        async def ids(**filters: Any) -> list[str]:
            return [span.id for span in (await stage.traffic.list(ME, SpanFilter(**filters))).data]

        assert await ids() == ["chatcmpl-2", "chatcmpl-1"]
        assert await ids(deployment="router") == await ids(episode="e") == await ids(until_us=20) == ["chatcmpl-1"]
        assert await ids(since_us=20) == ["chatcmpl-2"]
        span = await stage.traffic.get(ME, "chatcmpl-1")
        assert (span.deployment, span.revision, span.model) == ("router", 1, "router")
        assert (await stage.traffic.list(STRANGER)).data == []
        for attempt in (stage.traffic.body(STRANGER, "chatcmpl-1"), stage.feedback.give(STRANGER, GiveFeedback(target="e", metric="m", value=1))):
            with pytest.raises(NotFound):
                await attempt

    play(tmp_path, story)


def test_feedback_finds_a_span_that_is_still_queued(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1", episode_id="episode-1"))
        up = await stage.feedback.give(ME, GiveFeedback(target="chatcmpl-1", metric="correct", value=True))
        assert (up.type, up.target_kind, up.target) == ("bool", "span", "chatcmpl-1")
        whole = await stage.feedback.give(ME, GiveFeedback(target="episode-1", metric="score", value=3, comment="fine"))
        assert (whole.type, whole.target_kind, whole.value, whole.comment) == ("float", "episode", 3, "fine")
        assert [given.id for given in (await stage.feedback.list(ME)).data] == [whole.id, up.id]

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "bool", "value": 1}, "value"),
        ({"type": "float", "value": float("nan")}, "value"),
        ({"type": "float", "value": True}, "value"),
        ({"type": "label", "value": " "}, "value"),
        ({"type": "demonstration", "value": {"role": "assistant"}}, "value"),
        ({"value": ["a"]}, "value"),
        ({"value": 10**400}, "value"),
        ({"value": "x" * 70_000}, "value"),
        ({"value": "\ud800"}, "value"),
    ],
)
def test_feedback_of_the_wrong_form_is_refused(given: dict[str, Any], field: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1"))
        with pytest.raises(InvalidInput) as refused:
            await stage.feedback.give(ME, GiveFeedback(target="chatcmpl-1", metric="m", value=None).model_copy(update=given))
        assert refused.value.field == field

    play(tmp_path, story)


def test_the_values_of_a_metric_are_of_one_type(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1", episode_id="e"))
        stage.traffic.record(chat("chatcmpl-2", project="other"))

        async def give(value: Any, kind: Any = None, *, target: str = "chatcmpl-1", metric: str = "helpful", me: Principal = ME) -> Any:
            return await stage.feedback.give(me, GiveFeedback(target=target, metric=metric, value=value, type=kind))

        await give(0.5)
        await give(1)
        for value, target in ((True, "chatcmpl-1"), ("very", "chatcmpl-1"), ("very", "e")):
            with pytest.raises(InvalidInput, match=r"metric `helpful` are of type `float` so far \(a finite number\)") as refused:
                await give(value, target=target)
            assert refused.value.field == "value"
        await give("so-so", metric="tone")
        await give("a better answer", "demonstration")
        await give("because", "comment")
        await give(True, target="chatcmpl-2", me=STRANGER)
        assert {given.value for given in (await stage.feedback.list(ME)).data if given.metric == "helpful"} == {0.5, 1, "a better answer", "because"}

    play(tmp_path, story)


def test_the_first_of_two_judgements_at_once_decides_what_a_metric_holds(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1"))
        given = (GiveFeedback(target="chatcmpl-1", metric="m", value=value) for value in (True, 0.5))
        outcomes = await asyncio.gather(*(stage.feedback.give(ME, each) for each in given), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Feedback", "InvalidInput"]

    play(tmp_path, story)


def test_preferences_name_another_completion(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.traffic.record(chat("chatcmpl-1"))
        stage.traffic.record(chat("chatcmpl-2"))
        preference = GiveFeedback(target="chatcmpl-1", metric="better", type="preference", value="chatcmpl-2")
        assert (await stage.feedback.give(ME, preference)).value == "chatcmpl-2"
        with pytest.raises(NotFound) as refused:
            await stage.feedback.give(ME, preference.model_copy(update={"value": "chatcmpl-3"}))
        assert refused.value.field == "value"

    play(tmp_path, story)


def test_garbage_collection_takes_expired_spans_with_bodies_and_judgements(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        recent = 2_000_000_000_000_000  # in the year 2033
        stage.traffic.record(chat("chatcmpl-old", started_us=0, episode_id="old"))
        stage.traffic.record(chat("chatcmpl-new", started_us=recent, samples=[RecordedSample([9], [-1.0], "length")]))
        for target in ("chatcmpl-old", "old", "chatcmpl-new"):
            await stage.feedback.give(ME, GiveFeedback(target=target, metric="m", value=True))
        await stage.blobs.put("snapshots/orphan.safetensors", b"12345")
        early = await stage.garbage.collect(ME)
        assert (early.spans, early.blobs) == (1, 0)  # blobs are young
        late = await stage.garbage.collect(ME, grace_us=-60_000_000)
        assert (late.spans, late.blobs) == (0, 2)
        assert late.bytes > 5
        assert [given.target for given in (await stage.feedback.list(ME)).data] == ["chatcmpl-new"]
        assert await stage.traffic.body(ME, "chatcmpl-new") is not None
        with pytest.raises(NotFound):
            await stage.traffic.get(ME, "chatcmpl-old")

    play(tmp_path, story)
