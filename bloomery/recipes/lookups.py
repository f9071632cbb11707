"""A small task of several turns: follow a word through a table that only a tool can read, and answer with the word that it ends at.

The model that ships has not seen this tool; a short supervised warm start on worked examples shows it the form. What is left to learn is to hand on
what the tool said, word by word, and to know when it is time to answer. Chance finds the end about never.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, Final, NamedTuple

from bloomery.client import Client
from bloomery.recipes.agents import Episode
from bloomery.recipes.pairs import WORDS
from bloomery.recipes.policy import Start
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Problem
from bloomery.recipes.sft import AdamConfig, SftConfig, datum, fine_tune
from bloomery.render import ChatTokenizer

SYSTEM: Final = "Call a tool: get. Answer with JSON."
LOOK_UPS: Final = 2
MOST_ANSWERS: Final = LOOK_UPS + 2
"""One more than it takes."""

Message = dict[str, Any]
Ask = Callable[[Sequence[Message]], str]
"""Gives the model's next message in a conversation, by whatever client."""


class Told(NamedTuple):
    """How a conversation went."""

    right: bool
    looked_up: int


def problems(number: int, seed: int) -> list[Problem]:
    """Chains of words, each leading to the next; different ones for different seeds, but for a coincidence of one in some ten thousand."""
    random = Random(seed)
    return [Problem(f"{seed}.{place}", (), tuple(random.sample(WORDS, LOOK_UPS + 1))) for place in range(number)]


def agent(episode: Episode) -> Reward:
    """Converses by our own client; any other of the OpenAI contract does as well."""
    with Client(episode.base_url.removesuffix("/v1"), episode.api_key) as model:
        told = converse(lambda messages: str(model.chat(episode.model, list(messages))["choices"][0]["message"]["content"]), episode.problem.data)
    return Reward(episode.rollout_id, float(told.right), {"looked_up": float(told.looked_up)})


def converse(ask: Ask, chain: Sequence[str]) -> Told:
    """Let the model call the tool until it answers, or does neither."""
    messages, table = opening(chain), dict(pairwise(chain))
    found: list[str] = []
    while True:
        said = read(content := ask(messages))
        value = get(table, said)
        if value is None or len(found) + 1 == MOST_ANSWERS:
            # The end of the chain counts where the tool has said it.
            return Told(said == {"answer": chain[-1]} and chain[-1] in found, len(found))
        found.append(value)
        messages += [{"role": "assistant", "content": content}, {"role": "tool", "tool_call_id": str(len(found)), "content": value}]


def read(content: str) -> Mapping[str, Any]:
    """The object that the model wrote; an empty one where it wrote none."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def get(table: Mapping[str, str], call: Mapping[str, Any]) -> str | None:
    """What the tool says to a call, `nothing` to one for a word that is not there; None where it is no call of it."""
    arguments = call.get("args")
    if call.get("tool") != "get" or not isinstance(arguments, dict) or not isinstance(arguments.get("key"), str):
        return None
    return table.get(arguments["key"], "nothing")


def opening(chain: Sequence[str]) -> list[Message]:
    """What the model is asked at first."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Follow {chain[0]}."}]


def worked(chain: Sequence[str]) -> list[Message]:
    """The whole conversation as it should go."""
    messages = opening(chain)
    for place, (key, value) in enumerate(pairwise(chain)):
        call = json.dumps({"tool": "get", "args": {"key": key}})
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "tool_call_id": str(place + 1), "content": value}]
    return [*messages, {"role": "assistant", "content": json.dumps({"answer": chain[-1]})}]


def warm_start(client: Client, tokenizer: ChatTokenizer, base_model: str, *, rank: int, examples: int, seed: int) -> Start:
    """Fine-tune on worked examples, once each: a checkpoint to begin reinforcement with."""
    run = client.create_run(base_model, rank, seed=seed)
    rendered = [tokenizer.render_training(worked(problem.data)) for problem in problems(examples, seed=-1 - seed)]
    config = SftConfig(epochs=1, adam=AdamConfig(learning_rate=4e-3), batch_size=16, seed=seed)
    fine_tune(run, [datum(row.tokens, row.weights) for row in rendered], config, lambda *_: None)
    run.save_checkpoint("warm").result()
    return Start(run.id, "warm")
