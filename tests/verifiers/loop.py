"""`python -m tests.verifiers.loop COMMAND ...`, in the virtual environment of the package: loops over its environments, told as JSON lines."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bloomery.client import Client, Sampler
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.agents import Agents
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Group, Problem, RolloutConfig
from bloomery.recipes.sft import AdamConfig, SftConfig, datum, fine_tune
from bloomery.recipes.verifiers_agent import VerifiersAgent, problems
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput
from tests.verifiers import environments

BASE = "bloomery-tiny"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--tokenizer", type=Path)
    asked = parser.parse_args()
    with Client(os.environ["BLOOMERY_URL"]) as client:
        tokenizer = ChatTokenizer.load(asked.tokenizer or Path(client.models()[0].path))
        for name in asked.names:
            COMMANDS[asked.command](client, tokenizer, name, asked.timeout_s)


def tell(name: str, **row: Any) -> None:
    print(json.dumps({"name": name} | row), flush=True)


def groups(client: Client, tokenizer: ChatTokenizer, name: str, timeout_s: float) -> None:
    """One group for each of two problems."""
    env = MADE[name]()
    with VerifiersAgent(env) as agent, Agents(agent, tokenizer, timeout_s=timeout_s) as agents:
        makes = agents.rollouts(lambda: client.sampler(BASE), RolloutConfig(group_size=3, max_tokens=8, attempts=1, seed=5))
        for number, problem in enumerate(rows := problems(env, 3)):
            if number != 1:
                tell_group(name, tokenizer, makes.group(number, problem))
    environments.Blocks.release.set()
    tell("end", problems=[problem.id for problem in rows], cancelled=environments.Waits.cancelled)


def tell_group(name: str, tokenizer: ChatTokenizer, group: Group) -> None:
    members = [
        {
            "reward": member.reward,
            "parts": dict(member.parts),
            "turns": member.turns,
            "answers": member.rollout.answers,
            "read": tokenizer.decode(member.rollout.segments[0].tokens),
            "wrote": tokenizer.decode(member.rollout.tokens),
        }
        for member in group.members
    ]
    tell(name, number=group.number, members=members, failures=[failure._asdict() for failure in group.failures])


def tools(client: Client, tokenizer: ChatTokenizer, name: str, timeout_s: float) -> None:
    """A group by the model that ships, and one by a model that was shown how to call the tool, behind the very tokens that it was asked with."""
    env = MADE[name]()
    rows = problems(env)
    with VerifiersAgent(env) as agent, Agents(agent, tokenizer, timeout_s=timeout_s) as agents:

        def groups_by(sampler: Sampler, asked: list[Problem]) -> list[Group]:
            makes = agents.rollouts(lambda: sampler, RolloutConfig(group_size=2, max_tokens=48, attempts=1, seed=5))
            return [makes.group(number, problem) for number, problem in enumerate(asked)]

        shown = []
        for group in groups_by(client.sampler(BASE), rows):
            first = group.members[0].rollout.segments[0]
            word = group.problem.data["info"]["word"]
            call = f'<tool_call>\n{{"name": "count", "arguments": {{"thing": "{word}"}}}}\n</tool_call>'
            answer = (*tokenizer.encode(call, add_special_tokens=False), tokenizer.end_tokens[0])
            prompt = first.tokens[: first.places[0]]
            shown.append(datum((*prompt, *answer), [0.0] * len(prompt) + [1.0] * len(answer)))
        run = client.create_run(BASE, 8, seed=1)
        fine_tune(run, shown, SftConfig(epochs=40, adam=AdamConfig(learning_rate=4e-3), batch_size=4, seed=1))
        for group in groups_by(client.sampler(run.save_snapshot().result().version), rows[:2]):
            tell_group(name, tokenizer, group)


def train(client: Client, tokenizer: ChatTokenizer, name: str, timeout_s: float) -> None:
    """Two steps of each loop."""
    policy = PolicyConfig(base_model=BASE, rank=4, learning_rate=1e-3, seed=3)
    rollouts = RolloutConfig(group_size=4, max_tokens=12, seed=11)
    env = MADE[name]()
    with VerifiersAgent(env) as agent, Agents(agent, tokenizer, timeout_s=timeout_s) as agents:

        def told(report: grpo.StepReport) -> None:
            tell(kind, step=report.step, metrics=dict(report.metrics))

        kind = "grpo"
        synchronous = grpo.GrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=2)
        grpo.train(client, problems(env), agents, synchronous, Path("s.json"), steps=2, on_step=told)
        kind = "async_grpo"
        config = async_grpo.AsyncGrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=2)
        async_grpo.train(client, problems(env), agents, config, Path("a.json"), steps=2, on_step=told)


def refuse(client: Client, tokenizer: ChatTokenizer, name: str, timeout_s: float) -> None:
    try:
        VerifiersAgent(MADE[name]())
    except InvalidInput as error:
        tell(name, refused=error.message)


MADE: dict[str, Callable[[], Any]] = {
    "single": environments.single_turn,
    "multi": environments.multi_turn,
    "tool": environments.with_a_tool,
    "two": environments.of_two,
    "raises": lambda: environments.single_turn(environments.raises),
    "raises-later": lambda: environments.single_turn(environments.raises_later),
    "nan": lambda: environments.single_turn(environments.not_a_number),
    "breaks": lambda: environments.Breaks(dataset=environments.rows(), rubric=environments.rubric(), max_turns=2),
    "crashes": lambda: environments.Crashes(dataset=environments.rows(), rubric=environments.rubric(), max_turns=2),
    "waits": lambda: environments.Waits(dataset=environments.rows(), rubric=environments.rubric(), max_turns=2),
    "gives-up": lambda: environments.Waits(dataset=environments.rows(), rubric=environments.rubric(), max_turns=2, timeout_seconds=1.0),
    "blocks": lambda: environments.Blocks(dataset=environments.rows(), rubric=environments.rubric(), max_turns=2),
    "cold": lambda: environments.single_turn(sampling_args={"temperature": 0.0}),
    "against": lambda: environments.single_turn(environments.against_each_other),
    "unscored": lambda: environments.single_turn(score_rollouts=False),
}
COMMANDS = {"groups": groups, "tools": tools, "train": train, "refuse": refuse}

if __name__ == "__main__":
    sys.exit(main())
