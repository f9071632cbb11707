"""The pretraining mixture: plain documents and conversations as weighted token sequences."""

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from hashlib import sha256
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from bloomery.models.tiny.corpus import Document
from bloomery.models.tiny.tasks import Chat, describe, generated, route
from bloomery.models.tiny.tokenizer import CONTEXT, END, END_OF_TEXT, START

MAX_TOKENS = 512
PROMPT_WEIGHT = 0.4
ANSWER_WEIGHT = 2.0
# Large packages would drown the small ones: draws grow with this power of a package's size.
BALANCE = 0.6
ROUTABLE_DOCUMENTS = 25
# Chances per sequence; the rest are generated tasks.
LONG, PLAIN, ROUTE, DESCRIBE = 0.006, 0.40, 0.33, 0.05


class Weighted(NamedTuple):
    """Tokens and, for each, how much predicting it counts."""

    tokens: list[int]
    weights: list[float]


class Shelf:
    """Documents by package, drawn with balanced chances."""

    def __init__(self, documents: Sequence[Document], *, routable: Sequence[str]) -> None:
        self._by_package: dict[str, list[Document]] = defaultdict(list)
        for document in documents:
            self._by_package[document.package].append(document)
        self.routable = list(routable)
        self._any = self._chances(sorted(self._by_package))
        self._routed = self._chances([name for name in routable if name in self._by_package])

    def any(self, random: Random) -> Document:
        """A document to read."""
        return self._from(self._any, random)

    def to_route(self, random: Random) -> Document:
        """A document whose package may be asked for."""
        return self._from(self._routed, random)

    def _chances(self, packages: list[str]) -> dict[str, float]:
        return {name: len(self._by_package[name]) ** BALANCE for name in packages}

    def _from(self, chances: dict[str, float], random: Random) -> Document:
        return random.choice(self._by_package[random.choices(list(chances), list(chances.values()))[0]])


def routable_packages(documents: Sequence[Document], *, without: Set[str]) -> list[str]:
    """Packages with enough documents to learn where they end, but for those of the demo."""
    counts = Counter(document.package for document in documents)
    return sorted(name for name, count in counts.items() if count >= ROUTABLE_DOCUMENTS and name not in without)


class Mixture:
    """Draws batches."""

    def __init__(self, shelf: Shelf, tokenizer: Tokenizer) -> None:
        self._shelf, self._tokenizer = shelf, tokenizer

    def batch(self, random: Random, tokens: int) -> list[Weighted]:
        """Sequences of about `tokens` tokens in total."""
        batch: list[Weighted] = []
        count = 0
        while count < tokens:
            batch.append(self._draw(random))
            count += len(batch[-1].tokens)
        return batch

    def plain(self, random: Random) -> Weighted:
        """A document as it is."""
        document = self._shelf.any(random)
        ids = self._tokenizer.encode(f"{END_OF_TEXT}{document.text}{END_OF_TEXT}").ids[:MAX_TOKENS]
        return Weighted(ids, [1.0] * len(ids))

    def long(self, random: Random) -> Weighted:
        """Documents one after the other until the context is full: most sequences are short, and the model must have seen its last positions."""
        ids: list[int] = []
        while len(ids) < CONTEXT:
            ids += self.plain(random).tokens[:-1]
        return Weighted(ids[:CONTEXT], [1.0] * CONTEXT)

    def routed(self, random: Random) -> Weighted:
        """A document and the question where it belongs."""
        return self.chat(route(random, self._shelf.to_route(random), self._shelf.routable))

    def task(self, random: Random) -> Weighted:
        """A generated conversation."""
        return self.chat(generated(random))

    def chat(self, chat: Chat) -> Weighted:
        """ChatML; a document that is too long loses its end, never the answer."""
        system = f"{START}system\n{chat.system}{END}\n" if chat.system else ""
        answer = self._tokenizer.encode(f"{chat.assistant}{END}\n").ids
        tail = self._tokenizer.encode(f"{END}\n{START}assistant\n").ids
        prompt = self._tokenizer.encode(f"{system}{START}user\n{chat.user}").ids[: MAX_TOKENS - len(answer) - len(tail)] + tail
        return Weighted(prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [ANSWER_WEIGHT] * len(answer))

    def _draw(self, random: Random) -> Weighted:
        kind = random.random()
        if kind < LONG:
            return self.long(random)
        if kind < PLAIN:
            return self.plain(random)
        if kind < PLAIN + ROUTE:
            return self.routed(random)
        if kind < PLAIN + ROUTE + DESCRIBE:
            return self.chat(describe(random, self._shelf.any(random)))
        return self.task(random)


def held_back(document: Document) -> bool:
    """One document in a hundred is only ever measured on."""
    return sha256(document.text.encode()).digest()[0] < 3
