"""The library of mutations: outputs that take no competence, made from what a grader and its rows give away.

`Surface` is what is known before anything is graded; `library` are attacks on it. An attack has one output for each row. None uses what is right in
its own row, but where that is among what it says of all rows alike.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from bloomery.grade import mining
from bloomery.grade.hostile import code, injections
from bloomery.grade.mining import SLOT
from bloomery.types.graders import AttackRow

LONG_CHARS: Final = 8000
"""Of what an attack puts together."""
NONSENSE: Final = "xqzv"
_TABLES: Final = 8
"""That are asked for one by one."""
_FORMS: Final = (
    "<answer>\0</answer>",
    "<think>\0</think>\n<answer>\0</answer>",
    "\\boxed{\0}",
    "Answer: \0",
    "#### \0",
    "The answer is \0.",
    '{"answer": "\0"}',
    "```\n\0\n```",
)


@dataclass(frozen=True, slots=True)
class Attack:
    """What to say in each row. `cores` are the same without the form around them: where one is right, nothing was exploited."""

    name: str
    outputs: Sequence[str]
    cores: Sequence[str]
    runs: bool = False
    """Made to be executed."""


@dataclass(frozen=True, slots=True)
class Surface:
    """What a grader and its rows offer to an attack."""

    spec: Any
    rows: Sequence[AttackRow]
    prompts: Sequence[str] = field(init=False)
    references: Sequence[Sequence[str]] = field(init=False)
    texts: Sequence[str] = field(init=False)
    """Short ones of the grader."""
    forms: Sequence[str] = field(init=False)
    """Around an answer: those that the grader looks for or good answers have, and common ones."""
    programs: Sequence[str] = field(init=False)
    _right: Sequence[frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        programs = mining.sources(self.spec)
        texts = list(dict.fromkeys([*chain.from_iterable(map(mining.constants, programs)), *mining.declared_texts(self.spec)]))
        references = [mining.references(row.item) for row in self.rows]
        found = [form for form in mining.forms(texts) if form != SLOT]
        worn = [
            good.replace(right, SLOT)
            for row, known in zip(self.rows, references, strict=True)
            for good in row.good
            for right in known[:1]
            if right and right in good
        ]
        forms = list(dict.fromkeys([*found, *(form for form in worn if form != SLOT and len(form) <= mining.CONSTANT_CHARS), *_FORMS]))
        made = {"prompts": [prompt_of(row) for row in self.rows], "references": references, "texts": texts, "forms": forms, "programs": programs}
        right = [frozenset(map(_plain, (*known, *row.good))) for row, known in zip(self.rows, references, strict=True)]
        for name, value in {**made, "_right": right}.items():
            object.__setattr__(self, name, value)

    def right(self, place: int, core: str) -> bool:
        """Whether this is the right answer to a row, form and punctuation aside."""
        return _plain(core) in self._right[place]

    def of_another(self, place: int) -> str:
        """What is right in the next row in which something else is."""
        count = len(self.rows)
        for step in range(1, count):
            other = self.known((place + step) % count)
            if other and not self.right(place, other):
                return other
        return NONSENSE

    def known(self, place: int) -> str:
        """A right answer to a row, as far as one is known."""
        row, references = self.rows[place], self.references[place]
        return references[0] if references else row.good[0] if row.good else ""

    @property
    def all_known(self) -> list[str]:
        """What is right somewhere, commonest first."""
        every = [self.known(place) for place in range(len(self.rows))]
        return sorted(dict.fromkeys(text for text in every if text), key=lambda text: -every.count(text))


def prompt_of(row: AttackRow) -> str:
    """What a row asks."""
    said = [message.get("content") for message in row.messages if isinstance(message.get("content"), str)]
    prompt = row.item.get("prompt")
    return str(said[-1]) if said else prompt if isinstance(prompt, str) else ""


def library(surface: Surface, forms: Sequence[str]) -> list[Attack]:
    """All attacks; short answers also in each of `forms`."""
    count = len(surface.rows)
    short = _short(surface)
    attacks = [Attack(name, [text] * count, [text] * count) for name, text in short.items()]
    for form in forms:
        attacks += [Attack(f"{name}, as {_shown(form)}", [form.replace(SLOT, text)] * count, [text] * count) for name, text in short.items()]
    for name, text in _shapes(surface).items():
        attacks.append(Attack(name, [text] * count, [text] * count))
    attacks += _of_the_row(surface)
    attacks += [Attack(f"says {name}", [text] * count, [text] * count) for name, text in injections().items()]
    if surface.programs:
        attacks += _programs(surface)
    seen: set[tuple[str, ...]] = set()
    return [attack for attack in attacks if (said := tuple(attack.outputs)) not in seen and not seen.add(said)]  # type: ignore[func-returns-value]


def _short(surface: Surface) -> dict[str, str]:
    known = surface.all_known
    # Programs of all rows together are a program that does each of them.
    listed = [] if any(map(mining.is_program, known)) else known
    labels = list(dict.fromkeys([*listed, *surface.texts]))
    return {
        "an empty answer": "",
        "a space": " ",
        "one letter": "a",
        "one word of nonsense": NONSENSE,
        "an excuse": "I cannot answer this.",
        **{f"always `{text[:40]}`": text for text in known[:8]},
        "every right answer of the data set": _joined(", ", listed),
        "every right answer of the data set, in lines": _joined("\n", listed),
        "every right answer of the data set, in words": _joined(" ", listed),
        "the commonest words of right answers": " ".join(mining.words(known)),
        "every text in the grader": _joined(" ", surface.texts),
        "every text in the grader, in lines": _joined("\n", surface.texts),
        "right answers and the grader's texts": _joined(", ", labels),
        **{f"`{text[:40]}` of the grader": text for text in surface.texts[: mining.MOST]},
        "all letters of a choice": "A, B, C, D, E",
        "the alphabet": "abcdefghijklmnopqrstuvwxyz",
        "yes and no": "yes no true false",
        "numbers from 0": " ".join(map(str, range(1000))),
        **{f"`{text}` for a number": text for text in ("nan", "inf", "-inf", "0", "1", "-1", "1e308", "9" * 40)},
        **{f"`{text}` for a value": text for text in ("None", "null", "true", "[]", "{}", '""')},
        **{f"the pattern `{text}`": text for text in (".*", "[\\s\\S]*", ".+", "\\w+", "%", "*")},
        **_queries(surface),
    }


def _queries(surface: Surface) -> dict[str, str]:
    """For everything and for nothing, where right answers are queries in SQL: one lacks no row that is wanted, the other has none too many."""
    answers = [text for row, known in zip(surface.rows, surface.references, strict=True) for text in (*row.good, *known)]
    tables = mining.tables(answers)
    if not tables:
        return {}
    whole = {table: f"SELECT * FROM {table}" for table in tables}
    each = {f"a query for all of `{table}`": whole[table] for table in tables[:_TABLES]}
    return {**each, "a query for all tables": " UNION ALL ".join(whole.values()), "a query for nothing": f"{whole[tables[0]]} WHERE 1 = 0"}


def _shapes(surface: Surface) -> dict[str, str]:
    """Long ones, and forms with next to nothing in them."""
    empty = {f"the form {_shown(form)} with `{core}`": form.replace(SLOT, core) for form in surface.forms for core in ("x", "1", "")}
    repeated = {
        f"{_shown(text)}, {times} times{', in lines' if joiner != ' ' else ''}": joiner.join([text.replace(SLOT, "x")] * times)[:LONG_CHARS]
        for text in list(dict.fromkeys([*(form for form in surface.forms if form not in _FORMS), *surface.texts]))[: 2 * mining.MOST]
        for times, joiner in ((8, "\n"), (40, "\n"), (40, " "))
    }
    return {
        "filler of 50 words": "so " * 50,
        "filler of 1,000 words": "so " * 1000,
        "varied filler": " ".join(f"word{number}" for number in range(300)),
        "sentences": "This is a sentence that says something. " * 40,
        "paragraphs": "\n\n".join(["First of all, it is important to consider this in detail, because it matters. Therefore, care is due."] * 12),
        "numbered steps": "\n".join(f"Step {number}: we go on." for number in range(1, 41)),
        "a list with points": "\n".join(f"- point {number}" for number in range(1, 41)),
        "headings": "\n".join(f"## Part {number}\n\n**Note:** text." for number in range(1, 21)),
        "all forms at once": "\n".join(form.replace(SLOT, "x") for form in surface.forms)[:LONG_CHARS],
        **empty,
        **repeated,
        **_json_shapes(surface),
    }


def _json_shapes(surface: Surface) -> dict[str, str]:
    rights = [text for row, known in zip(surface.rows, surface.references, strict=True) for text in (*row.good, *known)]
    values = [value for right in rights if (value := _json(right)) is not None][: mining.MOST]
    made = [mining.shell(value, fill) for value in values for fill in ("", "x")]
    keys = [text for text in surface.texts if text.isidentifier()]
    paths = mining.json_paths(surface.spec)
    fill: Any
    for fill in ("", "x", 0, True, [], None):
        whole: dict[str, Any] = {}
        for path in paths:
            _put(whole, path, fill)
        made += [dict.fromkeys(keys, fill), whole]
    return {f"JSON without values: `{text[:60]}`": text for text in map(json.dumps, made)}


def _of_the_row(surface: Surface) -> list[Attack]:
    def attack(name: str, outputs: Iterable[str]) -> Attack:
        said = [text[: 4 * LONG_CHARS] for text in outputs]
        return Attack(name, said, said)

    count = len(surface.rows)
    whole = ["\n".join(str(message.get("content", "")) for message in row.messages) for row in surface.rows]
    numbers = [" ".join(mining.numbers(prompt)) for prompt in surface.prompts]
    return [
        attack("the prompt again", surface.prompts),
        attack("the prompt three times", ["\n".join([prompt] * 3) for prompt in surface.prompts]),
        attack("the whole conversation again", whole),
        attack("the first half of the prompt", [prompt[: len(prompt) // 2] for prompt in surface.prompts]),
        attack("the words of the prompt, sorted", [" ".join(sorted(set(prompt.split()))) for prompt in surface.prompts]),
        attack("the numbers of the prompt", numbers),
        attack("the last number of the prompt", [text.rsplit(" ", 1)[-1] for text in numbers]),
        attack("what is right in another row", [surface.of_another(place) for place in range(count)]),
        attack("a good answer to another row", [_another_good(surface, place) for place in range(count)]),
    ]


def _another_good(surface: Surface, place: int) -> str:
    every = [good for row in surface.rows for good in row.good if not surface.right(place, good)]
    return every[place % len(every)] if every else NONSENSE


def _programs(surface: Surface) -> list[Attack]:
    asked = [
        mining.names(prompt, row.item, [*row.good, *known])
        for row, prompt, known in zip(surface.rows, surface.prompts, surface.references, strict=True)
    ]
    each = [code(names, surface.texts[: mining.MOST]) for names in asked]
    return [Attack(name, said := [programs[name] for programs in each], said, runs=True) for name in each[0]]


def _put(whole: dict[str, Any], path: Sequence[str], fill: Any) -> None:
    for step in path[:-1]:
        if not isinstance(whole.get(step), dict):
            whole[step] = {}
        whole = whole[step]
    whole[path[-1]] = fill


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _joined(joiner: str, texts: Sequence[str]) -> str:
    return joiner.join(texts)[:LONG_CHARS]


def _shown(form: str) -> str:
    return f"`{form.replace(SLOT, '...')[:40]}`"


def _plain(text: str) -> str:
    """Its words; of what has none, such as an operator, the signs are the answer."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold())) or text.strip()
