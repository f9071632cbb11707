"""Small environments as authors of `verifiers` write them, and some that go wrong; nothing here knows of Bloomery."""

import math
import threading
from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ["apple", "bread", "milk", "salt"]
STOCK = {"apple": 3, "bread": 12, "milk": 7, "salt": 1}


def rows() -> Dataset:
    return Dataset.from_list([{"question": f"How much {word}?", "answer": str(STOCK[word]), "info": {"word": word}} for word in WORDS])


def text(completion: Any) -> str:
    return "".join(str(message.content or "") for message in completion if message.role == "assistant")


def short(completion: Any) -> float:
    """Something that a tiny model differs in from draw to draw."""
    return 1.0 - min(len(text(completion)), 64) / 64


async def has_the_answer(completion: Any, answer: str) -> float:
    return float(answer in text(completion))


def rubric(*more: Any) -> vf.Rubric:
    return vf.Rubric(funcs=[has_the_answer, short, *more], weights=[1.0, 0.5, *(1.0 for _ in more)])


def single_turn(*more: Any, **options: Any) -> vf.Environment:
    return vf.SingleTurnEnv(dataset=rows(), system_prompt="Answer with a number.", rubric=rubric(*more), **options)


class Stock(vf.MultiTurnEnv):
    """Tells the stock after the first answer, and asks again; the second answer earns something of its own."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": f"The list says {STOCK[state['info']['word']]}. How much?"}]

    async def add_trajectory_step(self, state: Any, trajectory_step: Any) -> None:
        if state["trajectory"]:
            trajectory_step["reward"] = 0.25
        await super().add_trajectory_step(state, trajectory_step)


def multi_turn() -> vf.Environment:
    return Stock(dataset=rows(), rubric=rubric(), max_turns=2)


def count(thing: str) -> str:
    """Count a thing in stock.

    Args:
        thing: what to count
    """
    return str(STOCK.get(thing, 0))


def with_a_tool() -> vf.Environment:
    return vf.ToolEnv(dataset=rows(), tools=[count], rubric=rubric(), max_turns=2)


def of_two() -> vf.Environment:
    return vf.EnvGroup([single_turn(), multi_turn()], env_names=["single", "multi"])


def raises(completion: Any) -> float:
    raise ValueError("the judge is away")


async def raises_later(completion: Any) -> float:
    raise ValueError("the judge is away")


def not_a_number(completion: Any) -> float:
    return math.nan


def against_each_other(completions: Any) -> list[float]:
    return [float(len(text(completion))) for completion in completions]


class Breaks(Stock):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise vf.ToolError("the list is lost")


class Crashes(Stock):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise RuntimeError("the list is lost")


class Waits(Stock):
    """For good, unless the word is milk."""

    cancelled = 0

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        if state["info"]["word"] != "milk":
            import asyncio

            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                type(self).cancelled += 1
                raise
        return await super().env_response(messages, state, **more)


class Blocks(Stock):
    """Holds the event loop for good, once."""

    release = threading.Event()
    blocked = threading.Event()

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        if not self.blocked.is_set():
            self.blocked.set()
            self.release.wait(60)
        return await super().env_response(messages, state, **more)
