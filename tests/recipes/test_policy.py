"""The cursor: had groups, broken files, and runs that are not where it says."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest
from sqlalchemy import delete

from bloomery.client import Client
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.policy import Cursor, Policy, PolicyConfig, Start, fingerprint
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.recipes.segments import Segment, single
from bloomery.store import rows
from bloomery.types.errors import Conflict, Corrupt, Gone, NotFound
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


def test_a_cursor_of_another_loop_is_refused(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    Policy.open(client, TINY, path, "f")
    with pytest.raises(Conflict, match="of a loop with other settings or problems"):
        Policy.open(client, TINY, path, "g")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": "run"}', '{"run_id": "run", "step"'])
def test_a_file_that_is_no_cursor_is_refused(client: Client, tmp_path: Path, content: str) -> None:
    path = tmp_path / "cursor"
    path.write_text(content)
    with pytest.raises(Conflict, match="is no cursor of a loop"):
        Policy.open(client, TINY, path, "f")


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


def test_settings_that_decide_nothing_may_change() -> None:
    config = GrpoConfig(policy=TINY)
    same = GrpoConfig(policy=TINY, concurrency=3, max_lost_rounds=9, rollouts=RolloutConfig(sample_timeout_s=5, grade_timeout_s=5))
    other = GrpoConfig(policy=TINY, rollouts=RolloutConfig(seed=1))
    assert fingerprint(PROBLEMS, config) == fingerprint(PROBLEMS, same)
    assert len({fingerprint(PROBLEMS, config), fingerprint(PROBLEMS, other), fingerprint(PROBLEMS[:4], config)}) == 3


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
