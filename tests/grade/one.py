"""A program of its own that grades: `python -m tests.grade.one STYLE ENTRY FILE` prints what comes of rows that it reads, as JSON."""

import asyncio
import json
import sys
from pathlib import Path

from bloomery.grade.pool import Graders, Limits, Program
from bloomery.types.grading import GradeInput


async def main(style: str, entry: str, file: str) -> None:
    """Packages take long to import, and much memory."""
    limits = Limits(load_s=60.0, wall_s=60.0, memory_bytes=2 << 30)
    rows = [GradeInput.model_validate(row) for row in json.load(sys.stdin)]
    async with Graders() as graders:
        results = await graders.grade(Program(Path(file).read_text(), entry, style), rows, limits)  # type: ignore[arg-type]
    print(json.dumps([result.model_dump() for result in results]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
