"""C that is compiled for this machine when something is first computed with it. No torch.

The compiler `cc` is asked, and its library kept beside the bytecode, or in the user's cache. Where there is none, or with `BLOOMERY_NATIVE=0`,
whoever asked computes otherwise.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from bloomery.obs.machine import processor_flags

log = logging.getLogger(__name__)

POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FLAGS: Final = ("-O3", "-march=native", "-fPIC", "-Wno-psabi")
_COMPILE_S: Final = 60.0


class Compiled:
    """The C files of a folder as one library, whose functions return nothing."""

    def __init__(self, name: str, folder: Path, arguments: Mapping[str, Sequence[Any]], *, flags: Sequence[str] = (), instead: str) -> None:
        """`arguments` by function; `instead`: who computes where there is no library, for the log."""
        self._name, self._folder, self._arguments, self._instead = name, folder, arguments, instead
        self._flags = (*_FLAGS, *flags)

    @cached_property
    def identity(self) -> str:
        """Of the sources, the flags and the processor."""
        parts = [*(path.read_text() for path in self._files("*.[ch]")), *self._flags, platform.machine(), *sorted(processor_flags())]
        return f"{self._name}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"

    @cached_property
    def functions(self) -> Any:
        """The library, None where there is none; it is compiled when this is first asked."""
        if os.environ.get("BLOOMERY_NATIVE") == "0" or not sys.platform.startswith("linux"):
            return None
        failures = []
        for place in self._places():
            path = place / f"{self.identity}.so"
            try:
                if not path.exists():
                    self._compile(path)
                return self._bound(ctypes.CDLL(str(path)))
            except subprocess.SubprocessError as error:
                # Elsewhere the compiler would say the same.
                failures.append(f"cc: {getattr(error, 'stderr', None) or error}")
                break
            except OSError as error:
                failures.append(f"{place}: {error}")
        log.warning("%s computes what native kernels would: %s", self._instead, "; ".join(failures))
        return None

    def address(self, symbol: str) -> int | None:
        """Of a function of the library, for its own code; None where it has none of this name."""
        function = getattr(self.functions, symbol, None)
        return None if function is None else ctypes.cast(function, ctypes.c_void_p).value

    def _files(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(pattern))

    def _places(self) -> Iterator[Path]:
        yield self._folder / "__pycache__"
        # Of a user without a home there is none.
        with suppress(RuntimeError):
            yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bloomery"

    def _compile(self, path: Path) -> None:
        """Not linked against a library of threads: torch has loaded its own, whose threads these kernels share."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            objects = [f"{place}/{source.stem}.o" for source in self._files("*.c")]
            for source, made in zip(self._files("*.c"), objects, strict=True):
                _run("cc", *self._flags, "-c", str(source), "-o", made)
            _run("cc", "-shared", *objects, "-o", f"{place}/{path.name}", "-lm")
            # In one step, for whoever else compiles at the same time.
            Path(f"{place}/{path.name}").replace(path)

    def _bound(self, library: ctypes.CDLL) -> ctypes.CDLL:
        for name, arguments in self._arguments.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
