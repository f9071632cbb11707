"""Several jobs share an engine fairly: one whose steps are many times as large leaves another, of another method, its turns, and gets its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from bloomery.client import Client
from bloomery.types.jobs import Data, Evaluation, JobSpec, JobState
from bloomery.types.methods import Batches, DirectPreference, Reinforcement, Supervised
from tests.jobs.test_methods_live import BASE, chat, lines, pairs, preference, prompt
from tests.live import LiveServer, wait_until

SPREAD = "def score(output):\n    return min(1.0, len(set(output)) / 24)\n"
LARGE = Supervised(batches=Batches(epochs=500, rows=256))
OTHERS: dict[str, tuple[str, Any, int, int]] = {
    "dpo": ("fair-preferences", DirectPreference(batches=Batches(epochs=5, rows=4)), 10, 5),
    "rft": (
        "fair-prompts",
        Reinforcement(grader="fair-spread", asynchronous=True, steps=500, groups_per_step=2, group_size=4, max_tokens=16),
        16,
        48,
    ),
}
"""Their data, and how many of their steps are waited for, in which the large job is to take some, and at most so many."""


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[Client]:
    with Client(live_server.url, live_server.key) as client:
        for name, of in (("chats", chat), ("preferences", preference), ("prompts", prompt)):
            client.datasets.create(f"fair-{name}")
            client.datasets.add_version(f"fair-{name}", {"train": lines([of(each) for each in pairs(256, 1)])})
        client.graders.create("fair-spread", {"type": "function", "source": SPREAD, "entry": "score"})
        client.graders.waive("fair-spread", "what it counts is nothing to be good at")
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_job_of_large_steps_and_one_of_another_method_both_go_on_while_both_run(client: Client, name: str) -> None:
    """By steps that one takes while the other takes some, whatever time that is. A large step is some 20 passes. Were turns whole operations, a step
    of pairs, which has three that wait for one another, would come about once in a large one; were sampling what training leaves, or training what
    sampling leaves, one of both would take none."""
    dataset, method, steps, most = OTHERS[name]
    large = client.jobs.create(spec(f"large-beside-{name}", "fair-chats", LARGE)).id
    wait_until(lambda: client.jobs.get(large).progress.step >= 1)
    small = client.jobs.create(spec(f"small-{name}", dataset, method)).id

    def taken(job: str) -> int:
        now = client.jobs.get(job)
        assert not now.state.ended, now.reason
        return now.progress.step

    wait_until(lambda: taken(small) >= 1)
    of_small, of_large = taken(small), taken(large)
    wait_until(lambda: taken(small) >= of_small + steps)
    beside = taken(large) - of_large
    for job in (large, small):
        client.jobs.cancel(job)
    wait_until(lambda: all(client.jobs.get(job).state is JobState.CANCELLED for job in (large, small)))
    assert 1 <= beside <= most, (of_small, of_large, beside)


def spec(name: str, dataset: str, method: Any) -> JobSpec:
    return JobSpec(name=name, base_model=BASE, data=Data(dataset=dataset), method=method, rank=8, seed=1, evaluation=Evaluation(answers=0))
