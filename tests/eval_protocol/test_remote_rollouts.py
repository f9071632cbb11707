"""Remote rollouts on a server that the package's own parts make, and rewards by its evaluations; whatever goes wrong has a kind and is no reward."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from bloomery.client import Client
from bloomery.recipes.agents import Agents
from bloomery.recipes.remote_rollouts import Finished, RemoteRollouts, Score, problem
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Group, RolloutConfig
from bloomery.render import ChatTokenizer
from tests.eval_protocol.setup import interpreter, rollout_server, surroundings
from tests.live import LiveServer, free_port
from tests.recipes.loops import BASE

pytestmark = pytest.mark.slow

CONFIG: Final = RolloutConfig(group_size=2, max_tokens=8, attempts=1, seed=5)
_RUN_S: Final = 200.0


class Site(NamedTuple):
    """A running server of rollouts."""

    url: str
    gateway_port: int
    folder: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port, gateway_port = tmp_path_factory.mktemp("remote"), free_port(), free_port()
    with rollout_server(port, f"http://127.0.0.1:{gateway_port}", folder):
        yield Site(f"http://127.0.0.1:{port}", gateway_port, folder)


def group_of(live_server: LiveServer, site: Site, row: str, score: Score | None, timeout_s: float = 30.0, **options: Any) -> Group:
    asked = problem(row, [{"role": "user", "content": "How much?"}], ground_truth=3)
    rewards = {} if score is None else {"score": score}
    with Client(live_server.url, live_server.key) as client, RemoteRollouts(site.url, port=site.gateway_port, **rewards, **options) as remote:
        tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
        with Agents(remote, tokenizer, timeout_s=timeout_s) as agents:
            return agents.rollouts(lambda: client.sampler(BASE), CONFIG).group(7, asked)


def by_length(finished: Finished) -> Reward:
    assert [message["role"] for message in finished.messages] == ["user", "assistant", "user", "assistant"]
    assert (finished.problem.data["ground_truth"], finished.extras["answers"]) == (3, 2)
    wrote = "".join(str(message["content"]) for message in finished.messages if message["role"] == "assistant")
    return Reward(finished.rollout_id, float(len(wrote)), {"letters": float(len(wrote))})


def nothing(_: Finished) -> None:
    return None


def not_a_number(_: Finished) -> float:
    return float("nan")


def test_a_rollout_on_the_server_is_scored_by_the_conversation_that_was_served(live_server: LiveServer, site: Site) -> None:
    group = group_of(live_server, site, "fine", by_length)
    assert (len(group.members), group.failures) == (2, ())
    for member in group.members:
        assert len(member.rollout.answers) == 2
        assert member.parts == {"letters": member.reward}


def test_a_reward_that_the_server_reports_under_the_id_it_was_given_is_the_rollouts(live_server: LiveServer, site: Site) -> None:
    assert [member.reward for member in group_of(live_server, site, "reports.1", None).members] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("row", "score", "kind", "message"),
    [
        ("breaks", by_length, "raised", "status 13: the tool broke"),
        ("refused", by_length, "raised", "answered 422"),
        ("mute", nothing, "no_reward", "gave nothing"),
        ("mute", lambda _: 1.0, "no_tokens", "nothing to train on"),
        ("fine", not_a_number, "not_finite", "nan"),
        ("fine", nothing, "no_reward", "gave nothing"),
        ("reports-nan", None, "not_finite", "nan"),
        ("reports-foreign", None, "foreign_reward", "99.0"),
    ],
)
def test_whatever_goes_wrong_is_a_failure_with_a_kind(
    live_server: LiveServer, site: Site, row: str, score: Score | None, kind: str, message: str
) -> None:
    group = group_of(live_server, site, row, score)
    assert group.members == ()
    assert Counter((failure.kind, failure.final) for failure in group.failures) == {(kind, True): 2}
    assert all(message in failure.message for failure in group.failures)


@pytest.mark.parametrize("row", ["silent", "mistaken"])
def test_a_server_that_never_says_that_this_rollout_is_done_is_late(live_server: LiveServer, site: Site, row: str) -> None:
    group = group_of(live_server, site, row, by_length, timeout_s=5)
    assert [(failure.kind, failure.final) for failure in group.failures] == [("timeout", True)] * 2


def test_parameters_that_ask_for_another_distribution_come_back_as_the_servers_error(live_server: LiveServer, site: Site) -> None:
    group = group_of(live_server, site, "fine", by_length, completion_params={"temperature": 0.0})
    assert group.members == ()
    assert all("`temperature` can only be 1" in failure.message for failure in group.failures)


def test_a_server_that_is_away_is_said_so(live_server: LiveServer, site: Site) -> None:
    group = group_of(live_server, site._replace(url=f"http://127.0.0.1:{free_port()}"), "fine", by_length)
    assert [failure.kind for failure in group.failures] == ["raised", "raised"]
    assert all("cannot be reached" in failure.message for failure in group.failures)


@pytest.fixture(scope="module")
def evaluated(live_server: LiveServer, site: Site) -> list[dict[str, Any]]:
    """What the loop with the package's evaluations printed."""
    names = ["decorated", "asynchronous", "not_a_number", "invalid", "empty", "raises", "trained"]
    done = subprocess.run(
        [str(interpreter()), "-m", "tests.eval_protocol.loop", *names, "--server", site.url, "--gateway-port", str(site.gateway_port)],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=site.folder,
        env=surroundings(site.folder, {"BLOOMERY_URL": live_server.url, "BLOOMERY_API_KEY": live_server.key}),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_an_evaluations_score_is_the_reward_and_its_metrics_are_the_parts(evaluated: list[dict[str, Any]]) -> None:
    for name in ("decorated", "asynchronous"):
        (row,) = (row for row in evaluated if row["name"] == name)
        assert (len(row["members"]), row["failures"]) == (2, [])
        for member in row["members"]:
            assert 0 < member["reward"] <= 1
            assert member["parts"].keys() == {"right"}
            assert member["answers"] == 2


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("not_a_number", "not_finite", "nan"),
        ("invalid", "raised", "its score is not valid: short is good"),
        ("empty", "raised", "`evaluation_result` empty"),
        ("raises", "raised", "the judge is away"),
    ],
)
def test_an_evaluation_without_a_score_that_counts_is_a_failure(evaluated: list[dict[str, Any]], name: str, kind: str, message: str) -> None:
    (row,) = (row for row in evaluated if row["name"] == name)
    assert row["members"] == []
    assert [failure["kind"] for failure in row["failures"]] == [kind, kind]
    assert all(message in failure["message"] for failure in row["failures"])


def test_a_policy_trains_on_remote_rollouts_by_an_evaluation(evaluated: list[dict[str, Any]]) -> None:
    steps = [row["metrics"] for row in evaluated if row["name"] == "trained"]
    assert len(steps) == 2
    for metrics in steps:
        assert (metrics["ratio/k3"], metrics["groups/trained"], metrics["agents/answers"]) == (0, 2, 2)
        assert metrics["gradient_norm"] > 0
        assert "reward/part/right" in metrics
