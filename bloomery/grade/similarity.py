"""How alike two texts are, from 0 to 1, by the metrics that OpenAI's `text_similarity` names.

Words are runs of letters and digits, and every other character that is seen is a word of its own, except in ROUGE, which leaves those out. BLEU and
GLEU heed case, the others do not. Nothing is downloaded, so METEOR knows no synonyms: it matches equal words, and then equal stems.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, Literal

import snowballstemmer
from rapidfuzz import fuzz, utils
from rapidfuzz.distance import LCSseq

Metric = Literal["cosine", "fuzzy_match", "bleu", "gleu", "meteor", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]

MAX_CHARS: Final = 1 << 16
"""Of each text: beyond, comparing them takes seconds."""
MAX_FUZZY_CHARS: Final = 1 << 13
"""The same for `fuzzy_match`, which looks for the shorter text at every place of the longer one."""
NOTES: Final[Mapping[str, str]] = {"meteor": "METEOR by equal words and stems: without WordNet's synonyms"}
"""What is to be said with a score of a metric."""

_WORD: Final = re.compile(r"[^\W_]+|[^\w\s]|_")
_LETTERS: Final = re.compile(r"[^\W_]+")
_ORDERS: Final = 4
_ALPHA, _BETA, _GAMMA = 0.9, 3.0, 0.5
"""METEOR's weight of recall, and the power and the weight of its penalty for words out of order."""

Words = Sequence[str]


class TooLong(Exception):
    """A text has more characters than the metric compares."""


def similarity(metric: Metric, text: str, reference: str) -> float:
    """How alike these are by any metric but `cosine`, which a model measures (`cosine`)."""
    most = MAX_FUZZY_CHARS if metric == "fuzzy_match" else MAX_CHARS
    if (longest := max(len(text), len(reference))) > most:
        raise TooLong(f"a text has {longest} characters, and `{metric}` compares {most} at most")
    return _METRICS[metric](text, reference)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of two vectors; ValueError where one of them has no direction."""
    lengths = math.hypot(*first) * math.hypot(*second)
    if not (lengths and math.isfinite(lengths)):
        raise ValueError("an embedding is all zeros, or not finite")
    return max(-1.0, min(1.0, math.fsum(one * other for one, other in zip(first, second, strict=True)) / lengths))


def _fuzzy(text: str, reference: str) -> float:
    return fuzz.WRatio(text, reference, processor=utils.default_process) / 100


def _bleu(text: str, reference: str) -> float:
    """Of a sentence: orders up to four, as far as the text has them; an order without matches counts half of what the one before it did."""
    words, wanted = _WORD.findall(text), _WORD.findall(reference)
    if not words or not wanted:
        return float(words == wanted)
    logs, missing = [], 1
    for order in range(1, min(_ORDERS, len(words)) + 1):
        grams = _grams(words, order)
        if matches := (grams & _grams(wanted, order)).total():
            logs.append(math.log(matches / grams.total()))
        elif order == 1:
            return 0.0
        else:
            missing *= 2
            logs.append(-math.log(missing * grams.total()))
    brevity = min(0.0, 1 - len(wanted) / len(words))
    return math.exp(brevity + math.fsum(logs) / len(logs))


def _gleu(text: str, reference: str) -> float:
    """Matches of all orders up to four, over all that the longer text has."""
    words, wanted = _WORD.findall(text), _WORD.findall(reference)
    if not words or not wanted:
        return float(words == wanted)
    grams, wanted_grams = (sum((_grams(each, order) for order in range(1, _ORDERS + 1)), Counter()) for each in (words, wanted))
    return (grams & wanted_grams).total() / max(grams.total(), wanted_grams.total())


def _meteor(text: str, reference: str) -> float:
    words, wanted = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    if not words or not wanted:
        return float(words == wanted)
    matches = _aligned(words, wanted)
    if not matches:
        return 0.0
    precision, recall = len(matches) / len(words), len(matches) / len(wanted)
    mean = precision * recall / (_ALPHA * precision + (1 - _ALPHA) * recall)
    places = sorted(matches.items())
    chunks = 1 + sum(after != (word + 1, other + 1) for (word, other), after in pairwise(places))
    return mean * (1 - _GAMMA * math.pow(chunks / len(matches), _BETA))


def _aligned(words: Words, wanted: Words) -> dict[int, int]:
    """Which word is which of the reference: equal ones first, then those of one stem, each from the end, the last with the last."""
    matches: dict[int, int] = {}
    stem = snowballstemmer.stemmer("porter").stemWord
    for spelled in (str, stem):
        free: defaultdict[str, list[int]] = defaultdict(list)
        taken = set(matches.values())
        for place, word in enumerate(wanted):
            if place not in taken:
                free[spelled(word)].append(place)
        for place in reversed(range(len(words))):
            if place not in matches and (places := free.get(spelled(words[place]))):
                matches[place] = places.pop()
    return matches


def _rouge_n(order: int, text: str, reference: str) -> float:
    grams, wanted = (_grams(_LETTERS.findall(each.lower()), order) for each in (text, reference))
    return _f1((grams & wanted).total(), grams.total(), wanted.total())


def _rouge_l(text: str, reference: str) -> float:
    words, wanted = (_LETTERS.findall(each.lower()) for each in (text, reference))
    return _f1(LCSseq.similarity(words, wanted), len(words), len(wanted))


def _f1(matches: int, count: int, wanted: int) -> float:
    return 2 * matches / (count + wanted) if matches else 0.0


def _grams(words: Words, order: int) -> "Counter[tuple[str, ...]]":
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


_METRICS: Final[Mapping[str, Callable[[str, str], float]]] = {
    "fuzzy_match": _fuzzy,
    "bleu": _bleu,
    "gleu": _gleu,
    "meteor": _meteor,
    "rouge_l": _rouge_l,
    **{f"rouge_{order}": partial(_rouge_n, order) for order in range(1, 6)},
}
