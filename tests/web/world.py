"""A server with something on every page: data, graders, jobs of two methods, deployments, traffic, judgements, an evaluation."""

import json
from dataclasses import dataclass
from typing import Any

from bloomery.client import Client
from bloomery.recipes.sft import datum
from bloomery.types.evaluations import EvaluationSpec
from bloomery.types.jobs import Begin, Data, Evaluation, Job, JobSpec
from bloomery.types.methods import Batches, Optimizer, Reinforcement, Supervised
from tests.jobs.test_methods_live import GRADER, asked, chat, lines, pairs, prompt

BASE = "bloomery-tiny"
HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><script>document.title='stolen'</script>"
"""Where it runs, the title of the page changes."""


@dataclass(frozen=True, slots=True)
class World:
    """What there is, by what tests look for."""

    taught: Job
    rewarded: Job
    deployment: str
    program: str
    """A run that a program trained."""
    evaluation: str
    request: str
    """One that the deployment answered."""


def build(client: Client, said: str = HOSTILE) -> World:
    """Make it all, which takes a minute or two. `said`: what a program, a row and a question are called, or say."""
    with_rows(client, said)
    taught = client.jobs.create(
        JobSpec(
            name="taught",
            base_model=BASE,
            data=Data(dataset="chats"),
            method=Supervised(optimizer=Optimizer(learning_rate=3e-3), batches=Batches(epochs=3, rows=8)),
            evaluation=Evaluation(every=10, answers=8, max_tokens=48),
            seed=1,
        )
    )
    program = programmed(client, said)
    taught = client.jobs.wait(taught.id, 600)
    assert taught.result is not None, taught.reason
    rewarded = client.jobs.create(
        JobSpec(
            name="rewarded",
            base_model=BASE,
            data=Data(dataset="prompts"),
            method=Reinforcement(grader="right", steps=4, groups_per_step=4, group_size=4, max_tokens=48),
            evaluation=Evaluation(rows=8),
            begin=Begin(job="taught"),
            seed=1,
        )
    )
    client.deployments.create("front", BASE)
    client.deployments.promote("front", taught.result.version, {"why": "it is better"})
    for number, given in enumerate(pairs(6, 5)):
        answer = client.chat("front", asked(given), max_tokens=48, seed=number)
        client.feedback(answer["id"], "helpful", number % 2 == 0)
    asked_so = client.chat("front", [{"role": "user", "content": said}], max_tokens=4, seed=0)
    evaluated = client.evaluations.create(
        EvaluationSpec.model_validate(
            {
                "name": "compared",
                "data": {"dataset": "prompts", "split": "eval", "rows": 8},
                "models": [{"model": "front"}, {"model": BASE}],
                "graders": [{"grader": "right"}, {"grader": "short"}],
                "params": {"max_tokens": 48},
            }
        )
    )
    rewarded = client.jobs.wait(rewarded.id, 600)
    assert rewarded.result is not None, rewarded.reason
    client.evaluations.wait(evaluated.id, 300)
    return World(taught, rewarded, "front", program, evaluated.id, asked_so["id"])


def trained(client: Client) -> list[str]:
    """Names of what trains and has trained, in the order of the home page: what goes on first, and the newest before others."""
    jobs = client.jobs.list()
    of_jobs = {job.run for job in jobs}
    found = [(job.finished_us is None, job.created_us, job.spec.name) for job in jobs]
    found += [(run.state == "active", run.created_us, run.name or run.id) for run in client.runs() if run.id not in of_jobs]
    return [name for _, _, name in sorted(found, reverse=True)]


def places(world: World) -> list[str]:
    """The addresses of every page, with something on it."""
    evaluation = world.evaluation
    return [
        "/",
        "/runs",
        f"/runs/{world.rewarded.id}",
        f"/runs/{world.program}",
        f"/runs/compare?of={world.taught.id},{world.rewarded.id}",
        "/jobs",
        f"/jobs?clone={world.rewarded.id}",
        "/graders",
        "/graders/right",
        "/graders/new",
        "/rollouts",
        f"/rollouts/{world.rewarded.run}",
        *(f"/rollouts/{world.rewarded.run}?colour={colour}" for colour in ("advantage", "loss mask", "version")),
        "/deployments",
        f"/deployments/{world.deployment}",
        "/traces",
        f"/traces/{world.request}",
        "/playground",
        f"/labelling?evaluation={evaluation}",
        f"/labelling?evaluation={evaluation}&mode=pairs",
        "/keys",
        "/datasets",
        "/datasets/chats",
        "/datasets/damaged?as=text",
        "/evaluations",
        f"/evaluations/{evaluation}",
        f"/evaluations/compare?of={evaluation}",
        "/evaluations/leaderboard",
        "/evaluations/judges",
    ]


def with_rows(client: Client, said: str) -> None:
    """Data sets, one of them with rows that were left out, and graders."""
    client.datasets.create("chats")
    client.datasets.add_version(
        "chats", {"train": lines([chat(each) for each in pairs(96, 1)]), "eval": lines([chat(each) for each in pairs(16, 9)])}
    )
    client.datasets.create("prompts")
    client.datasets.add_version(
        "prompts", {"train": lines([prompt(each) for each in pairs(48, 2)]), "eval": lines([prompt(each) for each in pairs(16, 8)])}
    )
    broken: list[Any] = [chat(each) for each in pairs(6, 3)]
    broken += [{"messages": []}, {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": said}]}, {"nothing": 1}]
    client.datasets.create("damaged")
    client.datasets.upload("damaged", "\n".join(map(json.dumps, broken)).encode(), format="jsonl", on_error="skip")
    client.graders.create("right", {"type": "function", "source": GRADER, "entry": "score"})
    client.graders.create(
        "short", {"type": "function", "source": "def score(output):\n    return 1.0 if len(output) < 40 else 0.0\n", "entry": "score"}
    )


def programmed(client: Client, name: str) -> str:
    """A run that a program drives."""
    run = client.create_run(BASE, 8, seed=1, name=name)
    steps = [(run.forward_backward([datum([5, 6, 7, 8], [0.0, 1.0, 1.0, 1.0])]), run.optim_step(1e-3)) for _ in range(5)]
    for _, step in steps:
        step.result()
    run.save_snapshot("one").result()
    return run.id
