"""Data sets of our own under the names that the recipes load: sums so small that a tiny model sometimes guesses them.

Everything is counted out, nothing is drawn at random: each call writes the same bytes.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

CHATS: Final = (160, 128)
"""Rows to train on and to test on: `sl_basic` takes both in batches of 128 and drops what is left over."""
PROBLEMS: Final = (8, 4)
"""`rl_basic` asks for sixteen answers to each, whatever its command line says."""
PAIRS: Final = (64, 16)

_THINGS: Final = ("pens", "cups", "keys", "hats", "maps", "nuts", "bells", "boats", "coins", "lamps")
_PLACES: Final = ("shop", "box", "bag", "hall", "yard", "shed", "barn", "desk", "port", "mill")
_GSM8K_CARD: Final = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""

Row = dict[str, Any]


def write_data_sets(directory: Path) -> None:
    """`HuggingFaceH4/no_robots`, `openai/gsm8k` and `Anthropic/hh-rlhf`, as folders that `datasets.load_dataset` finds by name from here."""
    sums = list(_sums())
    for name, to_row, (train, test) in (
        ("HuggingFaceH4/no_robots", _chat, CHATS),
        ("openai/gsm8k/main", _problem, PROBLEMS),
        ("Anthropic/hh-rlhf", _pair, PAIRS),
    ):
        folder = directory / name
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "train.jsonl", [to_row(*each) for each in sums[:train]])
        _write(folder / "test.jsonl", [to_row(*each) for each in sums[train : train + test]])
    (directory / "openai/gsm8k/README.md").write_text(_GSM8K_CARD)


def _sums() -> Iterator[tuple[str, int]]:
    """Questions with their answers, which are 2, 3 or 4."""
    for number, (place, thing) in enumerate(itertools.product(_PLACES, _THINGS)):
        for turn in range(3):
            first, second = ((number + turn) % 2 + 1, (number // 2 + turn // 2) % 2 + 1)
            yield f"There are {first} {thing} in the {place}. I bring {second} more. How many {thing} are there?", first + second


def _chat(question: str, answer: int) -> Row:
    messages = [{"role": "user", "content": f"{question} Write it in \\boxed{{}}."}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]
    return {"prompt": question, "prompt_id": f"{len(question)}-{answer}", "messages": messages, "category": "Closed QA"}


def _problem(question: str, answer: int) -> Row:
    return {"question": question, "answer": f"One sum.\n#### {answer}"}


def _pair(question: str, answer: int) -> Row:
    asked = f"\n\nHuman: {question}\n\nAssistant: "
    return {"chosen": f"{asked}There are {answer}.", "rejected": f"{asked}I do not know."}


def _write(file: Path, rows: Sequence[Row]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
