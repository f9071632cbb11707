"""Generated conversations that teach the base model to follow a short instruction: route a document, answer in JSON, copy, choose, calculate.

Every task is a function of a random generator, so a seed gives the same conversations. Words and names stand here; documents come
from `corpus`.
"""

import json
import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from bloomery.models.tiny.corpus import Document


class Chat(NamedTuple):
    """One conversation of a single turn; an empty system message is left out."""

    system: str
    user: str
    assistant: str


TOPICS = {
    "weather": ["rain", "storm", "cloud", "wind", "snow", "sunshine", "fog", "thunder", "temperature", "forecast"],
    "sport": ["match", "goal", "team", "coach", "race", "player", "league", "tennis", "medal", "stadium"],
    "food": ["soup", "bread", "cheese", "recipe", "oven", "dinner", "salad", "kitchen", "spice", "breakfast"],
    "music": ["song", "guitar", "piano", "concert", "melody", "drum", "singer", "album", "orchestra", "rhythm"],
    "travel": ["flight", "hotel", "train", "passport", "luggage", "ticket", "airport", "journey", "map", "beach"],
    "money": ["invoice", "refund", "payment", "bank", "price", "budget", "salary", "loan", "tax", "discount"],
    "health": ["doctor", "medicine", "fever", "hospital", "sleep", "diet", "pain", "nurse", "vaccine", "exercise"],
    "account": ["password", "login", "username", "profile", "permission", "email", "lock", "reset", "code", "role"],
    "delivery": ["package", "courier", "parcel", "address", "warehouse", "tracking", "shipment", "return", "box", "label"],
    "software": ["crash", "bug", "screen", "update", "server", "file", "button", "error", "install", "network"],
}
SENTENCES = (
    "I have a question about the {a} and the {b}.",
    "Yesterday the {a} was better than the {b}.",
    "Can you help me with a {a}? The {b} is not right.",
    "The {a} and the {b} were the main subject.",
    "We talked for an hour about {a}, then about {b}.",
    "There is something wrong with my {a}; I think it is the {b}.",
    "She wrote a note about the {a} near the {b}.",
)
# fmt: off
NAMES = [
    "Ana", "Ben", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lee",
    "Mia", "Ned", "Ola", "Pam", "Raj", "Sue", "Tom", "Uma", "Vic", "Wen", "Yan", "Zoe",
]
# fmt: on
CITIES = ["Oslo", "Lima", "Cairo", "Tokyo", "Paris", "Delhi", "Rome", "Quito", "Perth", "Hanoi", "Porto", "Leeds"]
# fmt: off
WORDS = [
    "red", "blue", "green", "cat", "dog", "sun", "moon", "tree", "river", "stone", "cloud", "apple", "bread",
    "chair", "table", "lamp", "road", "ship", "bird", "fish", "star", "iron", "gold", "milk", "salt", "sand",
]
# fmt: on
LABEL_KEYS = ("package", "label", "class", "category", "answer", "topic", "library", "kind", "team", "result", "route", "intent")
ROUTE_SYSTEMS = (
    'Which package does this documentation belong to? Answer with JSON: {"KEY": "<name>"}.',
    'You route documentation to the package it belongs to. Answer in JSON only, like {"KEY": "name"}.',
    'Read the text and name its package as JSON with the key "KEY".',
    'Classify the text. Reply with {"KEY": ...} and nothing else.',
    'Route the description to its package. Answer in JSON with one key, "KEY".',
)
CHOICE_ASKS = ("Choose one of: {options}.", "The possible answers are {options}.", "Options: {options}.", "Labels: {options}.")


def route(random: Random, document: Document, packages: list[str]) -> Chat:
    """Name the package (or module) of a document, with or without a list to choose from, as JSON or as a word."""
    answer = document.package if random.random() < 0.75 else ".".join(document.module.split(".")[:2])
    key = "package" if random.random() < 0.5 else random.choice(LABEL_KEYS)
    if random.random() < 0.7:
        system, reply = random.choice(ROUTE_SYSTEMS).replace("KEY", key), json.dumps({key: answer})
    else:
        system, reply = random.choice(("Which package is this from?", "Name the package.", "Which library does this describe?")), answer
    if answer == document.package and random.random() < 0.35:
        system = f"{system} {_choices(random, answer, random.sample(packages, min(len(packages), random.randint(2, 14))))}"
    if random.random() < 0.15:
        return Chat("", f"{document.text}\n\n{system}", reply)
    return Chat(system, document.text, reply)


def describe(random: Random, document: Document) -> Chat:
    """Read the signature of a document: its name, kind or parameters."""
    text = document.text
    head = text.split("\n", 1)[0]
    match = re.match(r"(class|async def|def) ([\w.]+)", head)
    if match is None:
        return Chat("Repeat the first line.", text, head)
    kind = {"class": "class", "def": "function", "async def": "coroutine"}[match[1]]
    name, parameters = match[2], re.findall(r"[(,] ?\*{0,2}(\w+)", head)[:6]
    question, answer = random.choice(
        (
            ('Answer with JSON: {"name": ..., "kind": ...}.', json.dumps({"name": name, "kind": kind})),
            ("What is defined here? Give the name.", name),
            ("List the parameters as a JSON list.", json.dumps(parameters)),
            ("Is it a class, a function or a coroutine?", kind),
        )
    )
    return Chat(question, text, answer)


def generated(random: Random) -> Chat:
    """One conversation that needs no document."""
    return random.choice(GENERATORS)(random)


def classify(random: Random) -> Chat:
    """Sort a sentence into one of the given words."""
    topic = random.choice(list(TOPICS))
    a, b = random.sample(TOPICS[topic], 2)
    text = random.choice(SENTENCES).format(a=a, b=b)
    if random.random() < 0.4:
        text = f"{random.choice(NAMES)} writes: {text}"
    key = random.choice(LABEL_KEYS)
    options = _choices(random, topic, random.sample(list(TOPICS), random.randint(2, 7)))
    if random.random() < 0.7:
        return Chat(f'{options} Answer with JSON: {{"{key}": "<one of them>"}}.', text, json.dumps({key: topic}))
    return Chat(f"What is the text about? {options}", text, topic)


def fields(random: Random) -> Chat:
    """Fill a JSON object from a sentence."""
    name, city, count, thing = random.choice(NAMES), random.choice(CITIES), random.randint(1, 99), random.choice(WORDS)
    text = random.choice(
        (
            f"{name} from {city} ordered {count} {thing}s.",
            f"Please send {count} {thing}s to {name} in {city}.",
            f"In {city}, {name} found {count} {thing}s.",
            f"A {thing} costs {count} coins in {city}, says {name}.",
        )
    )
    values = {"name": name, "city": city, "count": count, "item": thing}
    keys = random.sample(list(values), random.randint(1, 4))
    return Chat(f"Extract {', '.join(keys)} as JSON.", text, json.dumps({key: values[key] for key in keys}))


def json_object(random: Random) -> Chat:
    """Turn pairs into JSON, or read one value of a JSON object."""
    pairs: dict[str, str | int] = {
        word: random.choice((random.choice(WORDS), random.randint(0, 99))) for word in random.sample(WORDS, random.randint(1, 4))
    }
    key = random.choice(list(pairs))
    if random.random() < 0.5:
        return Chat("Write as JSON.", ", ".join(f"{name} is {value}" for name, value in pairs.items()), json.dumps(pairs))
    return Chat("", f"{json.dumps(pairs)}\nWhat is the value of {key}?", str(pairs[key]))


def copy(random: Random) -> Chat:
    """Repeat, reverse, pick or count words."""
    words = random.sample([*WORDS, *NAMES], random.randint(2, 6))
    text = " ".join(words)
    question, answer = random.choice(
        (
            ("Repeat", text),
            ("Reverse the words", " ".join(reversed(words))),
            ("First word", words[0]),
            ("Last word", words[-1]),
            ("How many words", str(len(words))),
            ("As a JSON list", json.dumps(words)),
        )
    )
    return Chat("", f"{question}: {text}", answer)


def tool_call(random: Random) -> Chat:
    """Answer with a call of one of the named tools."""
    name, city, count, thing = random.choice(NAMES), random.choice(CITIES), random.randint(1, 99), random.choice(WORDS)
    question, tool, arguments = random.choice(
        (
            (f"What is the weather in {city}?", "get_weather", {"city": city}),
            (f"Write to {name} about the {thing}.", "send_mail", {"to": name, "subject": thing}),
            (f"Wake me in {count} minutes.", "set_timer", {"minutes": count}),
            (f"Remember the {thing}.", "add_note", {"text": thing}),
        )
    )
    return Chat(
        "Call a tool: get_weather, send_mail, set_timer or add_note. Answer with JSON.", question, json.dumps({"tool": tool, "args": arguments})
    )


def arithmetic(random: Random) -> Chat:
    """Sums, differences and comparisons of small numbers."""
    a, b = random.randint(0, 99), random.randint(0, 99)
    if random.random() < 0.5:
        return Chat("", random.choice(("What is {a}+{b}?", "{a}+{b}=", "Add {a} and {b}.")).format(a=a, b=b), str(a + b))
    if random.random() < 0.7:
        return Chat("", random.choice(("What is {a}-{b}?", "{a}-{b}=", "Take {b} from {a}.")).format(a=max(a, b), b=min(a, b)), str(abs(a - b)))
    return Chat("", f"Which is larger, {a} or {b}?", str(max(a, b)))


def sheet(random: Random) -> Chat:
    """Many sums at once: small numbers need practice more than phrasing."""
    count = random.randint(4, 12)
    pairs = [(random.randint(0, 99), random.randint(0, 99)) for _ in range(count)]
    lines = [f"{a}+{b}={a + b}" if random.random() < 0.6 else f"{max(a, b)}-{min(a, b)}={abs(a - b)}" for a, b in pairs]
    return Chat("", f"Write {count} sums.", "\n".join(lines))


GENERATORS: tuple[Callable[[Random], Chat], ...] = (classify, fields, json_object, copy, tool_call, arithmetic, arithmetic, sheet)


def _choices(random: Random, answer: str, others: list[str]) -> str:
    options = list(dict.fromkeys([*others, answer]))
    random.shuffle(options)
    return random.choice(CHOICE_ASKS).format(options=", ".join(options))
