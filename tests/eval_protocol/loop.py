"""`python -m tests.eval_protocol.loop NAME ...`, in the virtual environment of the package: rewards by its evaluations, told as JSON lines."""

import argparse
import json
import os
from pathlib import Path

from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.agents import Agents
from bloomery.recipes.eval_protocol_score import scored_by
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.remote_rollouts import RemoteRollouts, problem
from bloomery.recipes.rollouts import RolloutConfig
from bloomery.render import ChatTokenizer
from tests.eval_protocol import evaluations

BASE = "bloomery-tiny"
PROBLEMS = [problem(f"row.{number}", [{"role": "user", "content": f"How much of {number}?"}], ground_truth=number) for number in range(4)]
TRAINED = "trained"
"""The name that stands for two steps of training, by the decorated evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--server", required=True)
    parser.add_argument("--gateway-port", type=int, required=True)
    asked = parser.parse_args()
    with Client(os.environ["BLOOMERY_URL"]) as client:
        tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
        for name in asked.names:
            evaluate = getattr(evaluations, "decorated" if name == TRAINED else name)
            with RemoteRollouts(asked.server, scored_by(evaluate), port=asked.gateway_port) as remote, Agents(remote, tokenizer) as agents:
                if name == TRAINED:
                    train(client, agents)
                else:
                    group(client, agents, name)


def group(client: Client, agents: Agents, name: str) -> None:
    made = agents.rollouts(lambda: client.sampler(BASE), RolloutConfig(group_size=2, max_tokens=8, attempts=1, seed=5)).group(7, PROBLEMS[0])
    members = [{"reward": member.reward, "parts": dict(member.parts), "answers": len(member.rollout.answers)} for member in made.members]
    tell(name, members=members, failures=[failure._asdict() for failure in made.failures])


def train(client: Client, agents: Agents) -> None:
    policy = PolicyConfig(base_model=BASE, rank=4, learning_rate=1e-3, seed=3)
    config = grpo.GrpoConfig(policy=policy, rollouts=RolloutConfig(group_size=4, max_tokens=12, seed=11), groups_per_step=2)
    grpo.train(client, PROBLEMS, agents, config, Path("cursor.json"), steps=2, on_step=lambda report: tell(TRAINED, metrics=report.metrics))


def tell(name: str, **row: object) -> None:
    print(json.dumps({"name": name} | row), flush=True)


if __name__ == "__main__":
    main()
