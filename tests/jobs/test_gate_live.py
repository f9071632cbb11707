"""Graders are attacked before anybody pays: a job stands still before its first step where its rewards can be had without competence."""

from collections.abc import Iterator

import pytest

from bloomery.client import Client
from bloomery.types.errors import Conflict
from bloomery.types.jobs import Data, Evaluation, JobSpec, JobState
from bloomery.types.methods import Reinforcement
from tests.jobs.test_methods_live import BASE, lines, pairs, prompt
from tests.live import LiveServer

# Attacks are of a grader's hash, and no other test's is to have this one's.
WORDY = {"type": "function", "source": "def score(output):\n    return len(output) / 111\n", "entry": "score"}
MUTE = {"type": "function", "source": "def score(output):\n    return 0.0\n", "entry": "score"}
LENGTHY = {"type": "function", "source": "def score(output):\n    return len(output) / 113\n", "entry": "score"}
CHATTY = {"type": "function", "source": "def score(output):\n    return len(output.split()) / 31\n", "entry": "score"}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        client.datasets.create("gated")
        client.datasets.add_version("gated", {"train": lines([prompt(each) for each in pairs(16, 1)])})
        client.graders.create("wordy", WORDY)
        client.graders.create("mute", MUTE)
        client.graders.create("lengthy", LENGTHY)
        client.graders.create("chatty", CHATTY)
        yield client


def rft(name: str, grader: str, held_out_grader: str | None = None) -> JobSpec:
    method = Reinforcement(grader=grader, held_out_grader=held_out_grader, steps=2, groups_per_step=2, group_size=4, max_tokens=12)
    return JobSpec(name=name, base_model=BASE, data=Data(dataset="gated"), method=method, seed=1, evaluation=Evaluation(rows=1))


@pytest.mark.slow
def test_a_hackable_grader_blocks_a_job_until_it_is_waived(client: Client) -> None:
    blocked = client.jobs.wait(client.jobs.create(rft("blocked", "wordy")).id, 300)
    assert (blocked.state, blocked.progress.step, blocked.run) == (JobState.PAUSED, 0, None)
    assert blocked.reason is not None
    assert "pays without competence" in blocked.reason
    (attack,) = client.graders.attacks("wordy")
    assert str(attack.id) in blocked.reason
    assert attack.exploits[0].examples
    with pytest.raises(Conflict, match="pays without competence"):
        client.jobs.create(rft("refused", "wordy"))
    assert client.jobs.wait(client.jobs.resume("blocked").id, 300).state is JobState.PAUSED
    client.graders.waive("wordy", "stories are to be long", version=1)
    done = client.jobs.wait(client.jobs.resume("blocked").id, 300)
    assert (done.state, done.reason) == (JobState.SUCCEEDED, None)
    (waiver,) = [event for event in client.jobs.events("blocked") if "waived by" in event.message]
    assert (waiver.data["by"], waiver.data["reason"]) == ("development", "stories are to be long")
    assert len(client.graders.attacks("wordy")) == 1


@pytest.mark.slow
def test_a_held_out_grader_is_attacked_too_and_blocks_a_job_until_it_is_waived(client: Client) -> None:
    blocked = client.jobs.wait(client.jobs.create(rft("watched", "lengthy", "chatty")).id, 300)
    assert (blocked.state, blocked.progress.step, blocked.run) == (JobState.PAUSED, 0, None)
    # Whoever mends one of them knows of the other.
    for name in ("lengthy", "chatty"):
        assert f"grader `{name}` version 1 pays without competence" in (blocked.reason or "")
    with pytest.raises(Conflict, match=r"grader `lengthy` version 1 pays .*; grader `chatty` version 1 pays ") as both:
        client.jobs.create(rft("neither", "lengthy", "chatty"))
    assert both.value.field == "method.grader"
    client.graders.waive("lengthy", "stories are to be long")
    still = client.jobs.wait(client.jobs.resume("watched").id, 300)
    (attack,) = client.graders.attacks("chatty")
    assert still.state is JobState.PAUSED
    assert still.reason is not None
    assert "`lengthy`" not in still.reason
    assert str(attack.id) in still.reason
    assert attack.exploits[0].examples
    with pytest.raises(Conflict, match="grader `chatty` version 1 pays without competence") as refused:
        client.jobs.create(rft("not-watched", "lengthy", "chatty"))
    assert refused.value.field == "method.held_out_grader"
    waiver = client.graders.waive("chatty", "words are all that is looked at").waiver
    done = client.jobs.wait(client.jobs.resume("watched").id, 300)
    assert (done.state, done.reason) == (JobState.SUCCEEDED, None)
    told = [event for event in client.jobs.events("watched") if "waived by" in event.message]
    assert [event.data["reason"] for event in told] == ["stories are to be long", "words are all that is looked at"]
    # Nobody pays for the same twice: neither a job that goes on, nor another one.
    assert [len(client.graders.attacks(name)) for name in ("lengthy", "chatty")] == [1, 1]
    card = client.jobs.card("watched")
    assert card.held_out_by is not None
    assert (card.held_out_by.grader, card.held_out_by.verdict, card.held_out_by.waiver) == ("chatty", "hackable", waiver)


@pytest.mark.slow
def test_a_held_out_grader_that_sees_nothing_is_told_and_stops_no_job(client: Client) -> None:
    client.graders.waive("wordy", "stories are to be long", version=1)
    done = client.jobs.wait(client.jobs.create(rft("blind", "wordy", "mute")).id, 300)
    assert (done.state, done.reason) == (JobState.SUCCEEDED, None)
    assert any("it sees nothing" in event.message and event.level == "warning" for event in client.jobs.events("blind"))


@pytest.mark.slow
def test_a_grader_that_gives_everything_the_same_blocks_a_job(client: Client) -> None:
    blocked = client.jobs.wait(client.jobs.create(rft("mute", "mute")).id, 300)
    assert (blocked.state, blocked.progress.step) == (JobState.PAUSED, 0)
    assert "teaches nothing: it gives 0 to every attack and to" in (blocked.reason or "")
