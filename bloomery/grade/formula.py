"""`calculate_output` of a multi grader: arithmetic over the scores of its graders, read by a parser of its own, so that it can do nothing else.

`+ - * / ^`, parentheses, `min max abs floor ceil exp sqrt log`, numbers and names. Powers go before signs and from right to left: `-2^2` is -4, and
`2^3^2` is 512. `log` is the natural one.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bloomery.types.errors import InvalidInput, shown
from bloomery.types.grading import MOST_SCORE

MAX_CHARS: Final = 4096
MAX_DEPTH: Final = 64
"""Of parentheses, signs and powers within each other."""

Numbers = Mapping[str, float]
Compute = Callable[[Numbers], float]

_TOKEN: Final = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[^\W\d]\w*)|(?P<sign>[-+*/^(),]))", re.ASCII)
_ANY: Final = math.inf


class _Function(NamedTuple):
    compute: Callable[[Sequence[float]], float]
    most_arguments: float = 1


FUNCTIONS: Final[Mapping[str, _Function]] = {
    "min": _Function(min, _ANY),
    "max": _Function(max, _ANY),
    "abs": _Function(lambda given: abs(given[0])),
    "floor": _Function(lambda given: float(math.floor(given[0]))),
    "ceil": _Function(lambda given: float(math.ceil(given[0]))),
    "exp": _Function(lambda given: math.exp(given[0])),
    "sqrt": _Function(lambda given: math.sqrt(given[0])),
    "log": _Function(lambda given: math.log(given[0])),
}


class NoNumber(Exception):
    """What a formula comes to for these scores is no number; the message says where."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula that was read. `names` are those that it looks up."""

    text: str
    names: frozenset[str]
    _compute: Compute

    def value(self, scores: Numbers) -> float:
        """What it comes to, a finite number; NoNumber where it does not."""
        try:
            found = self._compute(scores)
        except (ArithmeticError, ValueError) as error:
            raise NoNumber(f"`{shown(self.text)}` is no number here: {error}") from None
        if not math.isfinite(found):
            raise NoNumber(f"`{shown(self.text)}` is {found} here")
        if abs(found) > MOST_SCORE:
            raise NoNumber(f"`{shown(self.text)}` is {found:g} here, and {MOST_SCORE:g} is the most that is a score")
        return found


def parse_formula(text: str, known: Iterable[str]) -> Formula:
    """Read a formula over these names; InvalidInput says where it is none."""
    if len(text) > MAX_CHARS:
        raise _wrong(f"has {len(text)} characters, at most {MAX_CHARS} are read")
    reader = _Reader(_tokens(text), frozenset(known))
    compute = reader.sum(0)
    if (rest := reader.next) is not None:
        raise _wrong(f"goes on with `{shown(rest.text)}` where it should be over", rest.place)
    return Formula(text, frozenset(reader.used), compute)


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def _tokens(text: str) -> list[_Token]:
    tokens, place, end = [], 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            at = place + len(text[place:]) - len(text[place:].lstrip())
            raise _wrong(f"has `{text[at]}`, which is no part of a formula", at)
        tokens.append(_Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup)))
        place = found.end()
    return tokens


class _Reader:
    """One function per level of precedence; each returns what computes the part that it read."""

    def __init__(self, tokens: list[_Token], known: frozenset[str]) -> None:
        self._tokens, self._place, self._known = tokens, 0, known
        self.used: set[str] = set()

    @property
    def next(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def sum(self, depth: int) -> Compute:
        parts, signs = [self._product(depth)], [1.0]
        while (sign := self._take("+", "-")) is not None:
            parts.append(self._product(depth))
            signs.append(1.0 if sign == "+" else -1.0)
        return parts[0] if len(parts) == 1 else lambda given: _added(signs, [part(given) for part in parts])

    def _product(self, depth: int) -> Compute:
        parts, signs = [self._signed(depth)], ["*"]
        while (sign := self._take("*", "/")) is not None:
            parts.append(self._signed(depth))
            signs.append(sign)
        return parts[0] if len(parts) == 1 else lambda given: _multiplied(signs, [part(given) for part in parts])

    def _signed(self, depth: int) -> Compute:
        _check_depth(depth)
        if (sign := self._take("+", "-")) is None:
            return self._power(depth)
        part = self._signed(depth + 1)
        return part if sign == "+" else lambda given: -part(given)

    def _power(self, depth: int) -> Compute:
        base = self._single(depth)
        if self._take("^") is None:
            return base
        exponent = self._signed(depth + 1)
        return lambda given: math.pow(base(given), exponent(given))

    def _single(self, depth: int) -> Compute:
        token = self.next
        if token is None:
            raise _wrong("ends where a number, a name or `(` should stand")
        self._place += 1
        if token.kind == "number":
            number = float(token.text)
            return lambda _: number
        if token.kind == "name":
            return self._call(token, depth) if self._take("(") is not None else self._score(token)
        if token.text != "(":
            raise _wrong(f"has `{token.text}` where a number, a name or `(` should stand", token.place)
        inner = self.sum(depth + 1)
        self._close(token)
        return inner

    def _score(self, token: _Token) -> Compute:
        name = token.text
        if name not in self._known:
            raise _wrong(f"names `{shown(name)}`, and the graders are {', '.join(sorted(map(shown, self._known)))}", token.place)
        self.used.add(name)
        return lambda given: given[name]

    def _call(self, token: _Token, depth: int) -> Compute:
        if (function := FUNCTIONS.get(token.text)) is None:
            raise _wrong(f"calls `{shown(token.text)}`, and the functions are {', '.join(FUNCTIONS)}", token.place)
        arguments = [self.sum(depth + 1)]
        while self._take(",") is not None:
            arguments.append(self.sum(depth + 1))
        self._close(token)
        if len(arguments) > function.most_arguments:
            raise _wrong(f"gives `{token.text}` {len(arguments)} numbers, and it takes one", token.place)
        return lambda given: function.compute([argument(given) for argument in arguments])

    def _take(self, *signs: str) -> str | None:
        if (token := self.next) is None or token.kind != "sign" or token.text not in signs:
            return None
        self._place += 1
        return token.text

    def _close(self, opened: _Token) -> None:
        if self._take(")") is None:
            raise _wrong("has no `)` for what begins here", opened.place)


def _added(signs: Sequence[float], parts: Sequence[float]) -> float:
    total = parts[0]
    for sign, part in zip(signs[1:], parts[1:], strict=True):
        total += sign * part
    return total


def _multiplied(signs: Sequence[str], parts: Sequence[float]) -> float:
    total = parts[0]
    for sign, part in zip(signs[1:], parts[1:], strict=True):
        total = total * part if sign == "*" else total / part
    return total


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _wrong(f"has more than {MAX_DEPTH} parts within each other")


def _wrong(what: str, place: int | None = None) -> InvalidInput:
    where = "" if place is None else f" (at character {place + 1})"
    return InvalidInput(f"`calculate_output` {what}{where}", field="calculate_output")
