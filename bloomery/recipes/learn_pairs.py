"""`python -m bloomery.recipes.learn_pairs`: the model that ships learns a small task by reinforcement, on a running server, in half a minute.

Prints JSON lines: how it does before, every step, and how it does after, on problems that nobody trained on and with 95 % intervals over them. Under
the same `--cursor` a run that was stopped goes on.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bloomery.client import Client
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.grpo import Measured, StepReport, measure
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import Policy, PolicyConfig
from bloomery.recipes.rollouts import RolloutConfig

HELD_OUT_SEED = 1_000_000
PROBLEMS, HELD_OUT = 512, 64
EVALUATION = RolloutConfig(group_size=8, max_tokens=32, seed=99)


def main() -> None:
    """Parse the command line and learn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700", help="of the server; its key is read from BLOOMERY_API_KEY")
    parser.add_argument("--base-model", default="bloomery-tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the run, the problems and the rollouts")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--asynchronous", action="store_true", help="sample while training")
    parser.add_argument("--max-head-offpolicy-versions", type=int, default=1, help="how stale asynchronous rollouts may be")
    parser.add_argument("--cursor", type=Path, required=True, help="where the loop keeps its place: a new file begins anew")
    asked = parser.parse_args()
    with Client(asked.url) as client:
        task = PairsTask.of(client, asked.base_model)
        held_out = task.problems(HELD_OUT, HELD_OUT_SEED)
        _print("before", _shown(measure(client.sampler(asked.base_model), held_out, task.grade, EVALUATION)))
        started = time.monotonic()
        policy = _loop(client, task, asked)(_show)
        trained_s = time.monotonic() - started
        _print("after", _shown(measure(policy.sampler, held_out, task.grade, EVALUATION)) | {"seconds": trained_s, "run": policy.run.id})


def _loop(client: Client, task: PairsTask, asked: argparse.Namespace) -> Callable[[Callable[[StepReport], None]], Policy]:
    problems = task.problems(PROBLEMS, asked.seed)
    policy = PolicyConfig(base_model=asked.base_model, learning_rate=asked.learning_rate, seed=asked.seed)
    rollouts = RolloutConfig(max_tokens=32, seed=asked.seed)
    if not asked.asynchronous:
        plain = grpo.GrpoConfig(policy=policy, rollouts=rollouts)
        return lambda note: grpo.train(client, problems, task.grade, plain, asked.cursor, steps=asked.steps, on_step=note)
    stale = async_grpo.AsyncGrpoConfig(policy=policy, rollouts=rollouts, max_head_offpolicy_versions=asked.max_head_offpolicy_versions)
    return lambda note: async_grpo.train(client, problems, task.grade, stale, asked.cursor, steps=asked.steps, on_step=note)


def _show(report: StepReport) -> None:
    failures = [reason._asdict() for reason in report.failures]
    _print("step", {"step": report.step, "version": report.version, "failures": failures} | report.metrics)


def _shown(measured: Measured) -> dict[str, object]:
    return {"reward": measured.mean, "interval": list(measured.interval), "problems": len(measured.means), "lost": measured.lost}


def _print(kind: str, row: Mapping[str, object]) -> None:
    print(json.dumps({"kind": kind} | {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()
