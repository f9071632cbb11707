"""`python -m bloomery.recipes.learn_lookups`: an agent with a tool learns by reinforcement on a running server, in some two minutes.

Prints JSON lines: how the model that ships does, how it does after the warm start, every step, and how it does at the end; on problems that nobody
trained on, with 95 % intervals over them. Under the same `--cursor` a run that was stopped goes on.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bloomery.client import Client, Sampler
from bloomery.recipes import grpo
from bloomery.recipes.agents import Agents
from bloomery.recipes.lookups import agent, problems, warm_start
from bloomery.recipes.pairs import PairsTask
from bloomery.recipes.policy import PolicyConfig, Start
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.render import ChatTokenizer

HELD_OUT_SEED = 1_000_000
PROBLEMS, HELD_OUT = 512, 48
EVALUATION = RolloutConfig(group_size=4, max_tokens=32, seed=99)
RANK = 16


def main() -> None:
    """Parse the command line and learn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700", help="of the server; its key is read from BLOOMERY_API_KEY")
    parser.add_argument("--base-model", default="bloomery-tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--examples", type=int, default=384, help="worked ones, of the warm start")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="problems that nobody trains on, which it is measured on")
    parser.add_argument("--seed", type=int, default=0, help="of the run, the problems and the rollouts")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--cursor", type=Path, required=True, help="where the loop keeps its place: a new file begins anew")
    asked = parser.parse_args()
    with Client(asked.url) as client:
        tokenizer = PairsTask.of(client, asked.base_model).tokenizer
        with Agents(agent, tokenizer) as agents:
            _learn(client, tokenizer, agents, asked)


def _learn(client: Client, tokenizer: ChatTokenizer, agents: Agents, asked: argparse.Namespace) -> None:
    anew, held_out = not asked.cursor.exists(), problems(asked.held_out, HELD_OUT_SEED)
    if anew:
        _measure("before", client.sampler(asked.base_model), agents, held_out)
    policy = PolicyConfig(
        base_model=asked.base_model, rank=RANK, learning_rate=asked.learning_rate, seed=asked.seed, start=_start(client, tokenizer, asked)
    )
    config = grpo.GrpoConfig(policy=policy, rollouts=RolloutConfig(max_tokens=32, seed=asked.seed))
    taught = problems(PROBLEMS, asked.seed)
    if anew:
        _measure("warm", grpo.train(client, taught, agents, config, asked.cursor, steps=0).sampler, agents, held_out)
    started = time.monotonic()
    trained = grpo.train(client, taught, agents, config, asked.cursor, steps=asked.steps, on_step=_show)
    _measure("after", trained.sampler, agents, held_out, seconds=time.monotonic() - started)


def _start(client: Client, tokenizer: ChatTokenizer, asked: argparse.Namespace) -> Start:
    """Warm once, and note beside the cursor where that is: a loop that goes on began there too."""
    noted = asked.cursor.with_name(f"{asked.cursor.name}.start")
    if noted.exists():
        return Start(*json.loads(noted.read_text(encoding="utf-8")))
    start = warm_start(client, tokenizer, asked.base_model, rank=RANK, examples=asked.examples, seed=asked.seed)
    noted.write_text(json.dumps(start), encoding="utf-8")
    return start


def _measure(kind: str, sampler: Sampler, agents: Agents, held_out: Sequence[Problem], **more: float) -> None:
    found = grpo.measure(sampler, held_out, agents, EVALUATION)
    _print(kind, {"reward": found.mean, "low": found.interval.low, "high": found.interval.high, "lost": float(found.lost)} | more)


def _show(report: grpo.StepReport) -> None:
    _print("step", {"step": float(report.step), "failures": [reason._asdict() for reason in report.failures]} | report.metrics)


def _print(kind: str, row: Mapping[str, object]) -> None:
    print(json.dumps({"kind": kind} | {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()
