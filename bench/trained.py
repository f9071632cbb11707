"""Weights that are really trained: those of the model that ships, which learns to write pairs (`recipes/pairs`) by GRPO over the public API with all
of its parameters, from the weights that ship, or of an adapter on it. Masters are float32 and begin on the numbers that are served, so these are the
first steps of a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.sync import peft

MODEL: Final = "bloomery-tiny"
GROUP_SIZE: Final = RolloutConfig().group_size
_PROBLEMS: Final = 512
_MAX_TOKENS: Final = 32


class Trained(NamedTuple):
    """Every version that a run published, in files of safetensors, and what the server says of how they travelled (`sync/...`)."""

    versions: list[Path]
    travelled: list[dict[str, float]]


@contextmanager
def server(dtype: str, threads: int) -> Iterator[Client]:
    """A client of one that serves the model in a number format, and is gone afterwards."""
    options = ("--threads", str(threads), "--replicas", "0")
    with serving(MODEL, keep=False, dtype=dtype, options=options) as found, Client(found.url, found.key) as client:
        yield client


def run(client: Client, folder: Path, *, learning_rate: float, rank: int = 0, steps: int, groups: int, seed: int) -> Trained:
    """A run of its own; a step of which no group taught anything has no version. Without a rank all parameters are trained."""
    task = PairsTask.of(client, MODEL)
    policy = PolicyConfig(base_model=MODEL, rank=rank, learning_rate=learning_rate, seed=seed)
    rollouts = RolloutConfig(max_tokens=_MAX_TOKENS, seed=seed)
    config = GrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=groups, concurrency=groups, kl_rollouts=0)
    problems, versions = task.problems(_PROBLEMS, seed), list[str]()
    learnt = grpo.train(client, problems, task.grade, config, folder / "cursor", steps=steps, on_step=lambda told: versions.append(told.version))
    files, name = [], peft.ADAPTER if rank else "model.safetensors"
    for version in dict.fromkeys((learnt.cursor.first, *versions)):
        files.append(folder / f"{version}.safetensors")
        client.versions.download(version, name, files[-1])
    told = [{name: value for name, value in each.values.items() if name.startswith("sync/") and value is not None} for each in learnt.run.metrics()]
    return Trained(files, [each for each in told if each])
