"""Jailed grades of a Python function that does little: `python -m bench.grades` prints one JSON line.

`batched` are grades per second of one batch after another in a pool of one place, and per second of processor time of all that take part (this
process, the fork server and its forks). `single_ms` is one grade in a jail of its own, from the call to its result, one after another. Limits in the
same run: a bare fork of as small an interpreter, which does nothing and is waited for, and a fresh interpreter that grades once without any jail.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from bench.line import Line, parser_of
from bench.machine import processor_s
from bloomery.grade.pool import Graders, Program
from bloomery.types.grading import GradeInput, Sample

PROGRAM: Final = Program("def grade(sample, item):\n    return float(sample['output_text'].strip() == item['answer'])\n", "grade", "openai")
_FORKS: Final = """
import os, time
import ctypes, inspect, json, linecache, socket, threading, traceback
took = []
for _ in range({count}):
    began = time.perf_counter()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    took.append(time.perf_counter() - began)
print(*took)
"""
_FRESH: Final = "import json\nrow = json.loads('{\"a\": 1}')\nprint(float(row['a'] == 1))"


def main() -> None:
    """Measure, limits first."""
    asked = _arguments()
    line = Line("grades")
    limits = {"bare_fork_ms": _spread(_bare_forks(asked.singles)), "fresh_interpreter_ms": _spread(_fresh_interpreters(max(5, asked.singles // 10)))}
    setting = {"batch": asked.batch, "batches": asked.batches, "singles": asked.singles, "places": 1}
    line.tell({**setting, **limits, **asyncio.run(_measured(asked))})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--singles", type=int, default=200)
    return parser.parse_args()


async def _measured(asked: argparse.Namespace) -> dict[str, object]:
    rows = [GradeInput(item={"answer": str(number)}, sample=Sample(output_text=f" {number}\n")) for number in range(asked.batch)]
    async with Graders(places=1) as graders:
        layers = (await graders.obtained()).layers
        await _graded(graders, rows[:1])
        singles = [await _graded(graders, rows[:1]) for _ in range(asked.singles)]
        before = _processor_s()
        batches = [await _graded(graders, rows) for _ in range(asked.batches)]
        # With one place a grade waits until the process before it has ended, so that its time is known.
        await _graded(graders, rows[:1])
        spent = _processor_s() - before
    grades = asked.batch * asked.batches
    return {
        "jail": layers,
        "batched_per_s": round(grades / sum(batches)),
        "batched_per_processor_s": round(grades / spent),
        "single_ms": _spread(singles),
    }


async def _graded(graders: Graders, rows: Sequence[GradeInput]) -> float:
    began = time.perf_counter()
    results = await graders.grade(PROGRAM, rows)
    took = time.perf_counter() - began
    assert [result.score for result in results] == [1.0] * len(rows)
    return took


def _processor_s() -> float:
    """Of this process, the fork server, and the forks that it has waited for."""
    return time.process_time() + processor_s(os.getpid(), waited_for=True)


def _bare_forks(count: int) -> list[float]:
    done = subprocess.run([sys.executable, "-I", "-c", _FORKS.format(count=count)], capture_output=True, text=True, env={}, check=True)
    return [float(each) for each in done.stdout.split()]


def _fresh_interpreters(count: int) -> list[float]:
    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", _FRESH], stdout=subprocess.DEVNULL, env={}, check=True)
        return time.perf_counter() - began

    return [once() for _ in range(count)]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    places = {f"p{percent}": ordered[percent * (len(ordered) - 1) // 100] for percent in (10, 50, 95)}
    figures = {"mean": statistics.fmean(ordered), **places}
    return {name: round(1000 * value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
