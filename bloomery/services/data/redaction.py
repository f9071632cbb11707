"""Secrets and personal data leave recorded traffic before it reaches the disk.

`redact` walks a JSON value and replaces what the patterns find by a placeholder; `pseudonym` does the same for identifiers, which must stay
distinct. A placeholder never spells the secret, so whoever stores a redacted text must not store its token ids.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from blake3 import blake3

REDACTION_VERSION: Final = 1
_CARD_DIGITS: Final = 13
_SHORTEST_CARD: Final = 10 ** (_CARD_DIGITS - 1)
_SHORT: Final = 64


class Redacted(NamedTuple):
    """The value without secrets, and whether anything was replaced."""

    value: Any
    changed: bool


def redact(value: Any) -> Redacted:
    """Replace secrets in every string, key and long number of a JSON value."""
    if isinstance(value, str):
        clean = redact_text(value)
        return Redacted(clean, clean != value)
    if isinstance(value, dict):
        pairs = [(_redact_name(str(key)), redact(item)) for key, item in value.items()]
        changed = any(item.changed for _, item in pairs) or any(clean != str(key) for (clean, _), key in zip(pairs, value, strict=True))
        return Redacted({key: item.value for key, item in pairs}, changed)
    if isinstance(value, list | tuple):
        if _short_numbers_alone(value):
            return Redacted(list(value), False)
        items = [redact(item) for item in value]
        return Redacted([item.value for item in items], any(item.changed for item in items))
    if isinstance(value, int) and abs(value) >= _SHORTEST_CARD:
        clean = redact_text(str(value))
        return Redacted(value, False) if clean == str(value) else Redacted(clean, True)
    return Redacted(value, False)


def _short_numbers_alone(values: Sequence[Any]) -> bool:
    """Whether they are integers that no pattern finds: a request may hold millions of token ids, too many to be looked at one by one."""
    return set(map(type, values)) == {int} and min(values) > -_SHORTEST_CARD and max(values) < _SHORTEST_CARD


def redact_text(text: str) -> str:
    """The text with every secret replaced by its placeholder."""
    for rule in _RULES:
        text = rule.pattern.sub(rule.replace, text)
    return text


def _redact_name(name: str) -> str:
    """The same for the name of a field, most of which come with every request."""
    return _redact_short(name) if len(name) <= _SHORT else redact_text(name)


@lru_cache(maxsize=1024)
def _redact_short(name: str) -> str:
    return redact_text(name)


def pseudonym(identifier: str) -> str:
    """The identifier itself, or a stable name for one that holds personal data: equal in, equal out."""
    if redact_text(identifier) == identifier:
        return identifier
    digest = blake3(identifier.encode("utf-8", "surrogatepass")).hexdigest()
    return f"redacted-{digest[:32]}"


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    replace: str | Callable[[re.Match[str]], str]


def _card(match: re.Match[str]) -> str:
    return "[card]" if _luhn(re.sub(r"\D", "", match[0])) else match[0]


def _luhn(digits: str) -> bool:
    doubled = [int(digit) * (1 + position % 2) for position, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


# Quantifiers are bounded where two neighbours could match the same text, so that no input makes matching quadratic.
# Order matters: a key inside a private-key block or a URL must not be cut out of it before the whole is recognised.
_RULES: Final = (
    _Rule(re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL), "[private key]"),
    _Rule(re.compile(r"(?i)\b(bearer|basic)\s{1,4}[A-Za-z0-9._~+/=-]{16,}"), r"\1 [token]"),
    _Rule(re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}"), "[token]"),
    _Rule(re.compile(r"(://)[^/\s:@]{1,128}:[^/\s@]{1,128}@"), r"\1[credentials]@"),
    _Rule(re.compile(r"\b(?:sk|pk|rk|tml)-[A-Za-z0-9_-]{16,}"), "[api key]"),
    _Rule(re.compile(r"\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,}"), "[api key]"),
    _Rule(re.compile(r"\b(?:gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{20,})"), "[api key]"),
    _Rule(re.compile(r"\b(?:xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{20,})"), "[api key]"),
    _Rule(
        re.compile(r"""(?i)\b((?:api|secret|access|private|auth)[_-]?(?:key|token|secret)["']?\s{0,4}[=:]\s{0,4}["']?)[A-Za-z0-9_./+=-]{16,}"""),
        r"\1[api key]",
    ),
    _Rule(re.compile(r"[\w.%+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"), "[email]"),
    _Rule(re.compile(r"(?<![\w.])\d(?:[ -]?\d){12,18}(?![\w])"), _card),
    _Rule(re.compile(r"(?<![\w.+])\+\d{1,3}(?:[ ./-]?\(?\d{1,4}\)?){2,6}(?!\w)"), "[phone]"),
    _Rule(re.compile(r"(?<![\w.+-])(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\w-])"), "[phone]"),
)
