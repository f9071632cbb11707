"""The kill list, part B: numbers that sampler and trainer do not share are caught before a version is trained on further.

Faults are injected into what asks the server and into what reads its answers; the checks score and train on their own. Each test passes without them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bloomery.client import Client, sampling
from bloomery.client.sample_message import SampleAnswer
from bloomery.client.sampling import PendingSample, Sampled, Sampler
from bloomery.recipes.advantages import mean_over_tokens, sort_groups, weigh
from bloomery.recipes.agreement import Agreement, agrees, check_drawn, check_on_policy, check_served, recompute
from bloomery.recipes.policy import Policy
from bloomery.recipes.rollouts import Group, Problem, RolloutConfig, Rollouts, without_foreign
from bloomery.types.errors import Corrupt, InvalidInput
from bloomery.types.fidelity import PLAIN_K3, Mode
from tests.live import LiveServer
from tests.recipes.loops import POLICY, PROBLEMS, Record
from tests.recipes.served import Row, rows
from tests.test_docs import ROOT

Patch = pytest.MonkeyPatch
DOCS = ROOT / "docs" / "rl.md"
CONFIG = RolloutConfig(group_size=4, max_tokens=24, seed=5)
OTHERS = "gives other log-probabilities than were served"


@dataclass(frozen=True)
class Fault:
    """One way in which numbers went wrong without a word, as `docs/rl.md` has it, with the threads of those who met it."""

    name: str
    threads: tuple[str, ...]
    inject: Callable[[Patch], None]


def asked_with(**other: Any) -> Callable[[Patch], None]:
    """What samples asks for other tokens than the loop knows of."""

    def inject(patch: Patch) -> None:
        sample = Sampler.sample
        patch.setattr(Sampler, "sample", lambda self, prompt, **asked: sample(self, prompt, **(asked | other)))

    return inject


def told(change: Callable[[float], float]) -> Callable[[Patch], None]:
    """Sampled tokens come with other log-probabilities than they were drawn with."""

    def inject(patch: Patch) -> None:
        read = sampling.read_answer

        def changed(body: bytes) -> SampleAnswer:
            answer = read(body)
            return answer._replace(sequences=tuple(each._replace(logprobs=tuple(map(change, each.logprobs))) for each in answer.sequences))

        patch.setattr(sampling, "read_answer", changed)

    return inject


FAULTS = (
    Fault("bias that adds up over a rollout", ("trl#4772",), told(lambda logprob: logprob - 0.012)),
    Fault("truncation that the trainer does not compute", ("trl#6789",), asked_with(top_k=20)),
    Fault("another temperature than the trainer's", ("trl#4159",), asked_with(temperature=0.7)),
)
LATER = {
    "newer weights never delivered": "verl#7495",
    "older weights after resume": "slime#1695",
    "difference that grows without learning": "open-instruct#1473",
    "log-probability that is no number": "RL#2180",
    "tokens of two versions under one name": "RL#2180",
    "raw log-probabilities of tokens drawn otherwise": "trl#4159",
}
"""Faults with a test of their own below, or in `test_holding`."""


def opened(client: Client, path: Path, **other: Any) -> Policy:
    return Policy.open(client, replace(POLICY, **other), path, "kill list")


def group(policy: Policy, number: int = 0, problem: Problem = PROBLEMS[0]) -> Group:
    return Rollouts(lambda: policy.sampler, Record().grade, CONFIG).group(number, problem)


def step(policy: Policy, made: Group, mode: Mode = "exact") -> None:
    """As a loop of one group a step: train, then hold the trainer's forward against what was served."""
    version = policy.cursor.version
    data = mean_over_tokens(weigh(sort_groups([made], 2).trained, by_deviation=True))
    check_on_policy(policy.train([row.datum for row in data], [made.number]), version, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "plain"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_numbers_that_differ_are_caught_by_scoring_and_by_training_and_without_the_fault_all_agree(
    client: Client, tmp_path: Path, monkeypatch: Patch, fault: Fault, mode: Mode
) -> None:
    sound = opened(client, tmp_path / "sound")
    made = group(sound)
    assert check_served(rows(made), client.sampler, mode)[sound.cursor.version].largest == 0
    step(sound, made, mode)
    broken = opened(client, tmp_path / "broken")
    version = broken.cursor.version
    with monkeypatch.context() as patch:
        fault.inject(patch)
        made = group(broken)
        with pytest.raises(Corrupt, match=f"version `{version}` {OTHERS}.*at token [0-9]+ of sequence [0-3]"):
            check_served(rows(made), client.sampler, mode)
        with pytest.raises(Corrupt, match=f"version `{version}` {OTHERS}"):
            step(broken, made, mode)


@pytest.mark.slow
def test_after_a_resume_tokens_of_older_weights_are_lost_by_name(client: Client, tmp_path: Path, monkeypatch: Patch) -> None:
    policy = opened(client, tmp_path / "cursor")
    step(policy, group(policy))
    resumed = opened(client, tmp_path / "cursor")
    assert len(without_foreign(group(resumed), resumed.knows).members) == CONFIG.group_size
    sampler = client.sampler
    monkeypatch.setattr(client, "sampler", lambda version: sampler(resumed.cursor.first))
    stale = opened(client, tmp_path / "cursor")
    left = without_foreign(group(stale), stale.knows)
    assert left.members == ()
    assert {(failure.kind, stale.cursor.first in failure.message) for failure in left.failures} == {("foreign_version", True)}


def under_the_name_of(patch: Patch, version: str) -> None:
    """Samples come of whatever weights, and say that they are of these."""
    result = PendingSample.result

    def renamed(self: PendingSample, timeout_s: float = 600.0) -> Sampled:
        return result(self, timeout_s)._replace(version=version)

    patch.setattr(PendingSample, "result", renamed)


@pytest.mark.slow
def test_after_a_resume_tokens_of_older_weights_under_the_newest_name_are_caught_by_the_trainer(
    client: Client, tmp_path: Path, monkeypatch: Patch
) -> None:
    policy = opened(client, tmp_path / "cursor")
    step(policy, group(policy))
    step(policy, group(policy, 1))
    newest = policy.cursor.version
    with monkeypatch.context() as patch:
        sampler = client.sampler
        patch.setattr(client, "sampler", lambda version: sampler(policy.cursor.first))
        under_the_name_of(patch, newest)
        stale = opened(client, tmp_path / "cursor")
        made = without_foreign(group(stale, 2), stale.knows)
        assert len(made.members) == CONFIG.group_size
        # Scoring asks the same wrong weights, and they agree with themselves.
        check_served(rows(made), client.sampler, "exact")
        with pytest.raises(Corrupt, match=f"version `{newest}` {OTHERS}"):
            step(stale, made)


@pytest.mark.slow
def test_tokens_of_two_versions_under_one_name_are_caught_by_scoring(client: Client, tmp_path: Path, monkeypatch: Patch) -> None:
    policy = opened(client, tmp_path / "cursor")
    before = group(policy)
    step(policy, before)
    first, newest = policy.cursor.first, policy.cursor.version
    whole = RolloutConfig(group_size=2, max_tokens=24, piece_tokens=8, seed=5)

    def in_pieces() -> list[Row]:
        # The weights change behind the first piece of each.
        served = iter([client.sampler(first), *[client.sampler(newest)] * 8])
        return rows(Rollouts(lambda: next(served), Record().grade, whole).group(0, PROBLEMS[0]))

    assert all(agreement.largest == 0 for agreement in check_served(in_pieces(), client.sampler, "exact").values())
    under_the_name_of(monkeypatch, newest)
    mixed = in_pieces()
    assert {version for each in mixed for version in each.versions} == {newest}
    with pytest.raises(Corrupt, match=f"version `{newest}` {OTHERS}.*at token [0-9]+ of sequence [0-3]"):
        check_served(mixed, client.sampler, "exact")


@pytest.mark.slow
@pytest.mark.parametrize("growth", [0.0, 1e-5])
def test_a_difference_that_grows_without_learning_is_caught_as_it_begins(client: Client, tmp_path: Path, monkeypatch: Patch, growth: float) -> None:
    policy = opened(client, tmp_path / "cursor", learning_rate=0.0)
    drift = [0.0]
    told(lambda logprob: logprob + drift[0])(monkeypatch)
    step(policy, group(policy))
    drift[0] += growth
    made = group(policy, 1)
    if growth:
        with pytest.raises(Corrupt, match=f"version `{policy.cursor.version}` {OTHERS}"):
            step(policy, made)
    else:
        step(policy, made)


@pytest.mark.slow
def test_a_log_probability_that_is_no_number_is_refused_by_its_place(client: Client, tmp_path: Path, monkeypatch: Patch) -> None:
    policy = opened(client, tmp_path / "cursor")
    step(policy, group(policy))
    told(lambda logprob: float("nan"))(monkeypatch)
    made = group(policy, 1)
    with pytest.raises(Corrupt, match=f"token 10 of sequence 0, of version `{policy.cursor.version}`, has the log-probability nan"):
        check_served(rows(made), client.sampler, "plain")
    # And by the server, whatever a loop checks.
    with pytest.raises(InvalidInput, match="logprobs` holds a value that is not finite"):
        step(policy, made)


def likeliest(server: LiveServer, row: Row) -> tuple[list[float], list[bool]]:
    """At the place of each sampled token: the log-probability of the likeliest one, and whether that is the one that came."""
    asked = {"model": row.versions[0], "prompt": row.tokens, "max_tokens": 1, "prompt_logprobs": 1}
    answer = httpx.post(f"{server.url}/v1/completions", headers={"authorization": f"Bearer {server.key}"}, json=asked, timeout=60)
    places = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    told = [(row.tokens[place], places[place]) for place in row.places]
    ranked = [({each["rank"]: each["logprob"] for each in at.values()}, at[str(token)]["rank"]) for token, at in told]
    return [by_rank[1] for by_rank, _ in ranked], [rank == 1 for _, rank in ranked]


@pytest.mark.slow
@pytest.mark.parametrize("other", [{}, {"temperature": 0.7}, {"top_k": 3}])
def test_tokens_of_another_distribution_beside_the_models_own_log_probabilities_are_caught_by_counting(
    live_server: LiveServer, client: Client, tmp_path: Path, monkeypatch: Patch, other: dict[str, Any]
) -> None:
    policy = opened(client, tmp_path / "cursor")
    version = policy.cursor.version
    many = RolloutConfig(group_size=16, max_tokens=64, seed=5)
    with monkeypatch.context() as patch:
        asked_with(**other)(patch)
        drawn = rows(Rollouts(lambda: policy.sampler, Record().grade, many).group(0, PROBLEMS[0]))
    # As of servers that tell raw log-probabilities whatever they draw from: nothing else sees that.
    raw = [row._replace(logprobs=tuple(again)) for row, again in zip(drawn, recompute(drawn, client.sampler, 60.0), strict=True)]
    assert check_served(raw, client.sampler, "exact")[version].largest == 0
    counted = [likeliest(live_server, row) for row in raw]
    counts = [value for values, _ in counted for value in values], [value for _, values in counted for value in values]
    if other:
        with pytest.raises(Corrupt, match=f"tokens of version `{version}` were not drawn from its distribution"):
            check_drawn(*counts, version)
    else:
        assert abs(check_drawn(*counts, version)) < 4


def test_a_bias_is_refused_where_k3_is_too_small_to_see_it_and_chance_is_not() -> None:
    biased = Agreement(tokens=128, k3=0.012**2 / 2, ratio=0.988, largest=0.012)
    assert biased.k3 < PLAIN_K3 / 10
    assert not agrees(biased, "plain")
    assert agrees(biased._replace(ratio=0.999), "plain")
    # Of so few tokens nobody can tell.
    assert agrees(biased._replace(tokens=9), "plain")
    assert not agrees(biased._replace(ratio=1.0), "exact")


def test_a_sequence_with_more_numbers_than_tokens_was_not_served_so() -> None:
    with pytest.raises(Corrupt, match="sequence 0 has 1 sampled tokens, 2 log-probabilities and 2 versions"):
        check_served([Row((7, 8), (1,), (-1.0, -1.0), ("v", "v"))], lambda version: pytest.fail("nothing is asked"), "plain")


def test_every_fault_of_numbers_stands_in_the_docs_with_its_thread() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    for name, threads in [*((fault.name, fault.threads) for fault in FAULTS), *((name, (thread,)) for name, thread in LATER.items())]:
        assert any(name in row and all(thread in row for thread in threads) for row in rows), name
