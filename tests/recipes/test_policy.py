"""The cursor: had groups, broken files, and runs that are not where it says."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete

from bloomery.client import Client
from bloomery.recipes.cursors import Cursor, Shown, _deciding, fingerprint
from bloomery.recipes.failures import Reason
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.policy import Policy, PolicyConfig, Scheduled, Start
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.recipes.segments import Segment, single
from bloomery.recipes.sft import AdamConfig
from bloomery.store import rows
from bloomery.types.errors import Conflict, Corrupt, Gone, InvalidInput, NotFound, Unavailable
from bloomery.types.operations import SnapshotResult
from tests.api.server import KEY, URL, serving
from tests.recipes.loops import PROBLEMS
from tests.services.runs_stage import datum

CURSOR = Cursor(run_id="run", fingerprint="f", step=1, round=2, seq=4, version="v", first="u", had_below=3, had=(5,), batch=(3, 7))
TINY = PolicyConfig(base_model="tiny", rank=4, loss="cross_entropy")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serving(tmp_path) as server, server.client() as client:
        yield client


def test_groups_are_had_once_in_whatever_order_they_are_done() -> None:
    after = CURSOR.after([4, 3, 8])
    assert (after.had_below, after.had, after.round, after.batch) == (6, (8,), 3, ())
    assert [group for group in range(10) if not after.has(group)] == [6, 7, 9]
    assert CURSOR.after([]).had_below == 3


def test_a_policy_begins_with_the_versions_of_its_run_and_publishes_one_with_every_update(client: Client, tmp_path: Path) -> None:
    policy = Policy.open(client, TINY, tmp_path / "cursor", "f")
    first = policy.cursor.version
    assert (policy.sampler.model, policy.step, policy.lag(first)) == (first, 0, 0)
    assert policy.train([datum([1, 2, 3])], [0, 1])["step"] == 1
    assert (policy.sampler.model, policy.step, policy.lag(first), policy.cursor.had_below) == (policy.cursor.version, 1, 1, 2)
    assert not policy.knows("another")


def test_a_round_without_data_is_had_and_publishes_nothing(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    assert policy.train([], [0, 1]) == {}
    again = Policy.open(client, TINY, path, "f")
    assert again.cursor == policy.cursor
    assert (again.cursor.round, again.step, again.cursor.had_below, again.run.next_seq) == (1, 0, 2, 2)


def served(*versions: str) -> list[Segment]:
    return [single([1], "turn", range(2, 2 + len(versions)), [-1.0] * len(versions), versions)]


def test_tokens_of_versions_that_the_loop_never_published_are_refused_by_name_before_anything_is_submitted(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, replace(TINY, agreement="off"), path, "f")
    first, written = policy.cursor.version, path.read_text()
    with pytest.raises(Corrupt, match=r"tokens of weights that this loop does not know: another, without a name\. "):
        policy.train([datum([1, 2, 3])], [0], served=served(first, "another", ""))
    # Neither the run nor the file has moved: the same group may be made again.
    assert (policy.run.next_seq, client.run(policy.run.id).next_seq, path.read_text()) == (2, 2, written)
    policy.train([datum([1, 2, 3])], [0], served=served(first, first))
    # Older weights of this loop are none of those.
    policy.train([datum([1, 2, 3])], [1], served=served(first, policy.cursor.version))
    assert (policy.step, policy.cursor.had_below) == (2, 2)


def test_what_a_round_showed_is_kept_until_it_was_told(client: Client, tmp_path: Path) -> None:
    path, shown = tmp_path / "cursor", Shown({"reward/raw": 0.5, "loss": math.inf}, (Reason("raised", "no idea", 3),))
    policy = Policy.open(client, TINY, path, "f")
    policy.train([datum([1, 2, 3])], [0], shown=shown, timed=lambda: {"seconds/step": 2.0})
    assert policy.shown is not None
    assert "seconds/publishing" in policy.shown.metrics
    published = policy.run.submitted(policy.run.next_seq - 1, SnapshotResult).result()
    assert published.sync().items() <= policy.shown.metrics.items()
    again = Policy.open(client, TINY, path, "f")
    assert again.shown == policy.shown
    assert again.shown is not None
    assert (again.shown.failures, again.shown.metrics["reward/raw"], again.shown.metrics["seconds/step"]) == (shown.failures, 0.5, 2.0)
    # The trainer's word counts.
    assert math.isfinite(again.shown.metrics["loss"])
    again.told()
    assert Policy.open(client, TINY, path, "f").shown is None
    again.train([], [1], shown=shown)
    assert Policy.open(client, TINY, path, "f").shown == shown


def test_a_cursor_of_before_there_was_anything_to_tell_is_one(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    policy.train([datum([1, 2, 3])], [0])
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "shown"}))
    again = Policy.open(client, TINY, path, "f")
    assert (again.step, again.shown) == (1, None)


def test_a_cursor_of_another_loop_is_refused(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    Policy.open(client, TINY, path, "f")
    with pytest.raises(Conflict, match="of a loop with other settings or problems"):
        Policy.open(client, TINY, path, "g")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": "run"}', '{"run_id": "run", "step"', "\0" * 300, "[" * 100_000])
def test_a_file_that_is_no_cursor_is_refused(client: Client, tmp_path: Path, content: str) -> None:
    path = tmp_path / "cursor"
    path.write_text(content)
    with pytest.raises(Conflict, match="is no cursor of a loop"):
        Policy.open(client, TINY, path, "f")


@pytest.mark.parametrize(
    "damage",
    [
        {"run_id": ""},
        {"run_id": "../keys"},
        {"step": None},
        {"step": "1"},
        {"round": -1},
        {"round": 1.5},
        {"seq": None},
        {"seq": math.nan},
        {"seq": True},
        {"version": 5},
        {"first": None},
        {"had_below": -4},
        {"had": "12"},
        {"had": [None]},
        {"batch": [[1]]},
        {"on_policy": "yes"},
        {"refused": None},
        {"shown": [1]},
        {"shown": [{"loss": "none"}, []]},
        {"another": 1},
    ],
    ids=str,
)
def test_a_cursor_that_says_what_none_says_is_refused_before_the_run_is_touched(client: Client, tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(Conflict, match="is no cursor of a loop: give another file to begin anew"):
        Policy.open(client, TINY, path, "f")
    assert client.run(policy.run.id).next_seq == policy.run.next_seq


def test_a_cursor_that_cannot_be_kept_ends_the_loop_before_anything_is_submitted(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no folder"):
        Policy.open(client, TINY, tmp_path / "nowhere" / "cursor", "f")
    assert list(client.runs()) == []
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    # What is written first, beside it, finds its place taken.
    taken = path.with_name("cursor.new")
    taken.mkdir()
    with pytest.raises(Unavailable, match=r"the cursor .* cannot be written \(Is a directory\)"):
        policy.train([datum([1, 2, 3])], [0])
    assert client.run(policy.run.id).next_seq == 2
    taken.rmdir()
    again = Policy.open(client, TINY, path, "f")
    again.train([datum([1, 2, 3])], [0])
    assert (again.step, again.cursor.had_below) == (1, 1)


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_run_that_is_not_where_the_cursor_says_is_refused(client: Client, tmp_path: Path, moved: int) -> None:
    path = tmp_path / "cursor"
    seq = Policy.open(client, TINY, path, "f").run.next_seq
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seq": seq - moved}))
    with pytest.raises(Conflict, match=f"the next operation of run .* is {seq}, and the cursor .* stands at {seq - moved}"):
        Policy.open(client, TINY, path, "f")


@pytest.mark.parametrize("there", [0, 1, 2])
def test_a_policy_begins_with_a_checkpoint_however_far_its_loading_had_come(client: Client, tmp_path: Path, there: int) -> None:
    tuned = client.create_run("tiny", 4, seed=0)
    tuned.forward_backward([datum([1, 2, 3])])
    tuned.optim_step(1e-3)
    tuned.save_checkpoint("tuned").result()
    path, config = tmp_path / "cursor", replace(TINY, start=Start(tuned.id, "tuned"))
    first = Policy.open(client, config, path, "f")
    run = client.create_run("tiny", 4, seed=0)
    path.write_text(json.dumps(asdict(replace(first.cursor, run_id=run.id, version="", first="", seq=1))))
    if there > 0:
        run.load(tuned.id, "tuned", optimizer=False).result()
    if there > 1:
        run.save_snapshot("start").result()
    policy = Policy.open(client, config, path, "f")
    assert (policy.run.next_seq, policy.cursor.first, policy.first.model) == (3, first.cursor.first, first.cursor.first)
    policy.train([datum([1, 2, 3])], [0])
    again = Policy.open(client, config, path, "f")
    assert (again.cursor.first, again.step) == (first.cursor.first, 1)
    assert again.cursor.version != first.cursor.first


def test_checkpoints_that_are_saved_by_the_way_do_not_stop_a_loop(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    policy.run.save_checkpoint("first").result()
    policy = Policy.open(client, TINY, path, "f")
    policy.train([datum([1, 2, 3])], [0, 1])
    policy.run.save_checkpoint("second").result()
    again = Policy.open(client, TINY, path, "f")
    assert (again.step, again.cursor.version, again.cursor.had_below) == (1, policy.cursor.version, 2)
    again.run.optim_step(1e-3)
    with pytest.raises(Conflict, match="another program uses the run"):
        Policy.open(client, TINY, path, "f")


def names(policy: Policy) -> list[tuple[str, str | None]]:
    """What the run kept, behind what it began with."""
    kept = reversed(policy.run.checkpoints())
    return [(each.kind, each.name) for each in kept if each.name != "start"]


def test_of_every_so_many_rounds_one_is_kept_and_where_nothing_was_trained_the_next(client: Client, tmp_path: Path) -> None:
    policy = Policy.open(client, TINY, tmp_path / "cursor", "f")
    kept = {}
    for number, data in enumerate([[datum([1, 2, 3])], [], [datum([1, 2, 3])], [datum([1, 2, 3])], [datum([1, 2, 3])]]):
        policy.train(data, [number], keep_every=2)
        if policy.cursor.kept == policy.cursor.round:
            kept[policy.cursor.round] = policy.cursor.version
    assert [*kept] == [3, 4]
    assert {each.name: each.version for each in policy.run.checkpoints() if each.kind == "snapshot" and each.name != "start"} == {
        f"step-{step}": version for step, version in kept.items()
    }
    begun = Policy.open(client, replace(TINY, start=Start(policy.run.id, "step-4")), tmp_path / "other", "f")
    assert begun.run.next_seq == 3


@pytest.mark.parametrize("there", [0, 1, 2, 3, 4])
def test_a_step_that_is_kept_is_kept_once_however_far_it_had_come(client: Client, tmp_path: Path, there: int) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    path.write_text(json.dumps(asdict(replace(policy.cursor, batch=(0,), keeps=True))))
    run, submitted = policy.run, [policy.run.forward_backward([datum([1, 2, 3])], "cross_entropy")] if there else []
    more = (lambda: run.optim_step(1e-3, grad_clip_norm=1.0), lambda: run.save_snapshot("step-1"), lambda: run.save_checkpoint("step-1"))
    for pending in [*submitted, *(submit() for submit in more[: max(0, there - 1)])]:
        pending.result()
    again = Policy.open(client, TINY, path, "f")
    if not there:
        assert (again.step, again.cursor.kept) == (0, 0)
        again.train([datum([1, 2, 3])], [0], keep_every=1)
    assert (again.step, again.cursor.kept, again.cursor.keeps, again.run.next_seq) == (1, 1, False, 6)
    assert names(again) == [("snapshot", "step-1"), ("named", "step-1")]
    assert Policy.open(client, TINY, path, "f").cursor == again.cursor


def test_a_step_of_which_nothing_came_after_all_is_not_kept(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    policy = Policy.open(client, TINY, path, "f")
    path.write_text(json.dumps(asdict(replace(policy.cursor, batch=(0,), keeps=True))))
    again = Policy.open(client, TINY, path, "f")
    again.train([], [0], keep_every=1)
    assert (again.cursor.round, again.cursor.kept, again.cursor.keeps, names(again)) == (1, 0, False, [])


def test_settings_that_decide_nothing_may_change() -> None:
    config = GrpoConfig(policy=TINY)
    same = GrpoConfig(
        policy=TINY, checkpoint_every=5, concurrency=3, max_lost_rounds=9, rollouts=RolloutConfig(sample_timeout_s=5, grade_timeout_s=5)
    )
    other = GrpoConfig(policy=TINY, rollouts=RolloutConfig(seed=1))
    assert fingerprint(PROBLEMS, config) == fingerprint(PROBLEMS, same)
    assert len({fingerprint(PROBLEMS, config), fingerprint(PROBLEMS, other), fingerprint(PROBLEMS[:4], config)}) == 3


def test_an_optimizer_follows_its_schedule_round_by_round_and_a_cursor_of_before_there_was_one_is_of_the_same_loop() -> None:
    adam = AdamConfig(learning_rate=1.0, decay="linear", warmup_share=0.5, weight_decay=0.1, grad_clip_norm=2.0)
    config = replace(TINY, optimizer=Scheduled(adam=adam, rounds=4))
    assert [config.update(done)["learning_rate"] for done in range(6)] == [0.5, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert (config.update(0)["weight_decay"], config.update(0)["grad_clip_norm"], config.update(0)["beta2"]) == (0.1, 2.0, 0.95)
    assert TINY.update(3) == {"learning_rate": TINY.learning_rate, "grad_clip_norm": 1.0}
    before = {name: value for name, value in asdict(GrpoConfig(policy=TINY)).items() if name != "policy"}
    assert fingerprint(PROBLEMS, GrpoConfig(policy=TINY)) != fingerprint(PROBLEMS, GrpoConfig(policy=config))
    known = {name: value for name, value in asdict(TINY).items() if name != "optimizer"}
    described = [_deciding({"policy": known, **before}), [(problem.id, problem.prompt) for problem in PROBLEMS]]
    assert fingerprint(PROBLEMS, GrpoConfig(policy=TINY)) == hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def test_the_learning_rate_of_a_round_is_shown_and_applied_by_whoever_goes_on(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    config = replace(TINY, optimizer=Scheduled(adam=AdamConfig(learning_rate=1e-2, warmup_share=0.0), rounds=3))
    shown = []
    for number in range(3):
        policy = Policy.open(client, config, path, "f")
        policy.train([datum([1, 2, 3])], [number])
        assert policy.shown is not None
        shown.append(policy.shown.metrics["learning_rate"])
    assert shown == [1e-2, 1e-2, 5e-3]


class Forgetful(httpx.BaseTransport):
    """Of a server that has dropped the results of all operations."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and "/operations/" in request.url.path:
            return httpx.Response(410, json={"error": {"message": "the result was dropped", "code": "gone"}})
        return self._transport.handle_request(request)


def test_a_loop_whose_steps_are_done_needs_no_result_and_one_within_a_step_is_told_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    with serving(tmp_path) as server, server.client() as client, Client(URL, KEY, transport=Forgetful(server.transport)) as later:
        policy = Policy.open(client, TINY, path, "f")
        policy.train([datum([1, 2, 3])], [0, 1])
        assert Policy.open(later, TINY, path, "f").cursor == policy.cursor
        within = replace(policy.cursor, step=0, round=0, seq=policy.cursor.seq - 3, version=policy.cursor.first, had_below=0, batch=(0, 1))
        path.write_text(json.dumps(asdict(within)))
        with pytest.raises(Gone, match=f"the result was dropped.* save a checkpoint of run `{policy.run.id}`, and begin anew with it as `start`"):
            Policy.open(later, TINY, path, "f")
        assert Policy.open(client, TINY, path, "f").cursor == policy.cursor


@pytest.mark.parametrize("killed", [None, "before", "after"])
def test_weights_that_the_server_let_go_are_published_anew_from_the_run(tmp_path: Path, killed: str | None) -> None:
    path = tmp_path / "cursor"
    with serving(tmp_path) as server, server.client() as client:
        policy = Policy.open(client, TINY, path, "f")
        policy.train([datum([1, 2, 3])], [0, 1])
        then = policy.cursor
        let_go = delete(rows.checkpoint).where(rows.checkpoint.c.version == then.version)
        server.call(server.services.versions._database.write(lambda connection: connection.execute(let_go)))
        with pytest.raises(NotFound):
            client.sampler(then.version)
        if killed:
            path.write_text(json.dumps(asdict(replace(then, version=""))))
        if killed == "after":
            policy.run.save_snapshot().result()
        again = Policy.open(client, TINY, path, "f")
        assert again.cursor == replace(then, version=again.cursor.version, seq=then.seq + 1)
        assert (again.run.state().step, again.sampler.model, again.first.model) == (1, again.cursor.version, then.first)
        assert again.train([datum([1, 2, 3])], [2])["step"] == 2
        assert Policy.open(client, TINY, path, "f").cursor == again.cursor
