"""Where the demo's questions come from: the documentation of the standard library, or the user's own file.

A user's file is checked by the server, which knows the number of a broken row; its rows are then split by a hash of their text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from bloomery.client import Client
from bloomery.recipes import stdlib_docs
from bloomery.recipes.loop import Rows
from bloomery.recipes.task import Question, Task, routing_task, share_of, task_of_rows
from bloomery.render import ChatTokenizer
from bloomery.types.datasets import ChatRow
from bloomery.types.errors import InvalidInput

MIN_ROWS = 50
FIRST_SHARE, TRAFFIC_SHARE = 0.4, 0.4
_SHOWN_CHARS = 60


class DemoRows(NamedTuple):
    """A task and its rows."""

    task: Task
    rows: Rows


def from_stdlib() -> DemoRows:
    """Route documentation to its package."""
    docs = stdlib_docs.build()
    task = routing_task(docs.labels)
    first, traffic, held_out = ([task.ask(row.text, row.label) for row in split] for split in (docs.first, docs.traffic, docs.held_out))
    return DemoRows(task, Rows(first, traffic, held_out))


def from_file(client: Client, path: Path) -> DemoRows:
    """The user's CSV or JSONL; one broken row refuses the file by its number."""
    stored = _imported(client, path)
    chat = _format(path) == "jsonl" and '"messages"' in path.read_text(encoding="utf-8")[:4096]
    task = task_of_rows(stored, chat=chat)
    questions = [task.question_of(row.messages) if chat else _asked(task, row) for row in stored]
    if len(questions) < MIN_ROWS:
        raise InvalidInput(f"{path} has {len(questions)} different rows; the demo splits them in three and needs at least {MIN_ROWS}", field="data")
    rows = split(questions)
    if not all(rows):
        raise InvalidInput(f"{path}: rows with one text stay together, and these have too few different texts to be split in three", field="data")
    return DemoRows(task, rows)


def check_fit(rows: Rows, tokenizer: ChatTokenizer, room: int) -> None:
    """Every prompt must leave the model room to answer, and its row be one to learn from: better said now than after minutes."""
    for question in (question for part in rows for question in part):
        tokenizer.render_training(question.messages)
        if (length := len(tokenizer.render_prompt(question.prompt))) > room:
            start = question.text[:_SHOWN_CHARS]
            raise InvalidInput(
                f"the row that begins {start!r} has {length} tokens, and the model takes {room} beside the answer: shorten it", field="data"
            )


def split(questions: Sequence[Question]) -> Rows:
    """About 40 / 40 / 20, by hash of the text, so that equal texts stay together."""
    shares = [(share_of(question.text), question) for question in questions]
    border = FIRST_SHARE + TRAFFIC_SHARE
    return Rows(
        first=[question for share, question in shares if share < FIRST_SHARE],
        traffic=[question for share, question in shares if FIRST_SHARE <= share < border],
        held_out=[question for share, question in shares if share >= border],
    )


def _imported(client: Client, path: Path) -> list[ChatRow]:
    client.datasets.create("uploaded")
    version = client.datasets.add_version("uploaded", {"train": _read(path)}, format=_format(path), kind="chat")
    return [row for row in client.datasets.rows("uploaded", version.id, "train") if isinstance(row, ChatRow)]


def _format(path: Path) -> Literal["csv", "jsonl"]:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise InvalidInput(f"{path} must end in .csv or .jsonl, so that it is clear how to read it", field="data")
    return "csv" if suffix == ".csv" else "jsonl"


def _read(path: Path) -> str:
    _format(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", field="data") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text: byte {error.start} cannot be read", field="data") from None


def _asked(task: Task, row: ChatRow) -> Question:
    prompt, answer = row.messages[0], row.messages[-1]
    return task.ask(prompt["content"], answer["content"])
