"""The process in which a Parquet file is read: bytes by a stranger, decoded by a library in C++, with little time and memory and nothing to reach.

Started as a script by `row_files`, with the file as standard input and no other module of ours. It writes one line of JSON for each row, or for one
that is none what it is instead: `{"row": {...}}` or `{"error": ...}`; of a file that cannot be read `{"fatal": ...}` alone.
"""

import base64
import json
import resource
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, BinaryIO, Final

import pyarrow
import pyarrow.parquet

MEMORY_BYTES: Final = 2 << 30
CPU_S: Final = 300
ROWS_AT_ONCE: Final = 64
"""Values repeat in a column for nothing, so few bytes may decode to many rows of megabytes."""
_OPEN_FILES: Final = 32


def main() -> None:
    """Write all rows of the file on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    try:
        write_rows(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # Whoever reads has read enough.
        sys.stderr.close()
    except MemoryError:
        _write(sys.stdout.buffer, {"fatal": f"needs more than {MEMORY_BYTES >> 20} MiB of memory"})
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        _write(sys.stdout.buffer, {"fatal": f"is not Parquet, or is damaged: {error}"[:1000]})


def write_rows(source: BinaryIO, target: BinaryIO) -> None:
    """Batch by batch."""
    table = pyarrow.parquet.ParquetFile(pyarrow.PythonFile(source, mode="r"), memory_map=False, pre_buffer=False)
    for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
        for row in batch.to_pylist():
            try:
                line: dict[str, Any] = {"row": _plain(row)}
            except ValueError as error:
                line = {"error": str(error)}
            _write(target, line)
    target.flush()


def _write(target: BinaryIO, line: dict[str, Any]) -> None:
    target.write(json.dumps(line).encode() + b"\n")
    target.flush()


def _plain(value: Any) -> Any:
    """As JSON has it. Structs of Arrow have all fields of their column: those without a value are none of this row's."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return value


if __name__ == "__main__":
    main()
