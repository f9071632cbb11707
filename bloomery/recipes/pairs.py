"""A small verifiable task: write pairs of words as JSON.

The model that ships gets about one in twelve right when it is sampled: it knows JSON and loses words on the way. So there is something to learn,
chance finds it often enough, and an answer is right or wrong.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bloomery.client import Client
from bloomery.recipes.rollouts import Problem, Rollout
from bloomery.render import ChatTokenizer
from bloomery.types.errors import NotFound

SYSTEM: Final = "Write as JSON."
# fmt: off
WORDS: Final = (
    "red", "blue", "green", "cat", "dog", "sun", "moon", "tree", "river", "stone", "cloud", "apple", "bread",
    "chair", "table", "lamp", "road", "ship", "bird", "fish", "star", "iron", "gold", "milk", "salt", "sand",
)
# fmt: on


class PairsTask(NamedTuple):
    """Renders problems and grades rollouts with one tokenizer."""

    tokenizer: ChatTokenizer

    @classmethod
    def of(cls, client: Client, base_model: str) -> "PairsTask":
        """With the tokenizer of a base model of a server on this machine."""
        paths = {model.alias: model.path for model in client.models()}
        if base_model not in paths:
            raise NotFound(f"there is no base model `{base_model}`: the server has {', '.join(sorted(paths))}", field="base_model")
        return cls(ChatTokenizer.load(Path(paths[base_model])))

    def problems(self, count: int, seed: int, pairs: int = 2) -> list[Problem]:
        """Different ones for different seeds, but for a coincidence of one in some hundred thousand."""
        random = Random(seed)
        return [self._problem(f"{seed}.{number}", random.sample(WORDS, 2 * pairs)) for number in range(count)]

    def grade(self, rollout: Rollout) -> float:
        """1 for JSON with exactly these pairs, else 0."""
        return float(rollout.stopped and self._read(rollout.tokens[:-1]) == rollout.problem.data)

    def _problem(self, name: str, words: Sequence[str]) -> Problem:
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        said = ", ".join(f"{key} is {value}" for key, value in pairs.items())
        prompt = self.tokenizer.render_prompt([{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}])
        return Problem(name, tuple(prompt), pairs)

    def _read(self, tokens: Sequence[int]) -> object:
        try:
            answer: object = json.loads(self.tokenizer.decode(tokens))
        except (ValueError, RecursionError):
            return None
        return answer
