"""The process in which a chat template runs: a program by a stranger, with little time, little memory and nothing to reach.

Started as a script by `sandbox`, with the socket to it as standard input and no other module of ours. The first line it reads is the template, every
further one the variables of a rendering, and which of them it must read; it answers each with one line: `{"text": ...}`, `{"error": ...}`, or
`{"unread": ...}` with the name of one that it does not. All lines are JSON.
"""

import json
import resource
import signal
import socket
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S: Final = 1.0
MEMORY_BYTES: Final = 512 << 20
OUTPUT_CHARS: Final = 16 << 20
_OPEN_FILES: Final = 32
_ERROR_CHARS: Final = 1000


def main() -> None:
    """Answer until the other end closes."""
    channel = socket.socket(fileno=0)
    _limit_resources()
    with channel, channel.makefile("rb") as lines:
        program = Program(json.loads(next(lines)))
        for line in lines:
            variables, read = json.loads(line)
            # The default action of the signal ends the process wherever it is, inside C code too, which a Python handler would not.
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            answer = program.answer(variables, read)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(json.dumps(answer).encode() + b"\n")


class Program:
    """The template; compiled when it is first needed, because compiling may fail and takes time too."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: Template | None = None

    def answer(self, variables: dict[str, Any], read: list[str]) -> dict[str, str]:
        """What it writes, or why it does not, or which of some variables it does not `read`."""
        # The boundary to the template: whatever it raises is its answer.
        try:
            if read and (unread := set(read) - self._reads):
                return {"unread": min(unread)}
            text = self._write(variables)
        except MemoryError:
            return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except TemplateError as error:
            return {"error": (error.message or type(error).__name__)[:_ERROR_CHARS]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]}
        if len(text) > OUTPUT_CHARS:
            return {"error": f"it writes {len(text)} characters, at most {OUTPUT_CHARS} are allowed"}
        return {"text": text}

    @cached_property
    def _reads(self) -> set[str]:
        """Names that it has from whoever renders it: none of its own, of loops or of functions."""
        return meta.find_undeclared_variables(environment().parse(self._source))

    def _write(self, variables: dict[str, Any]) -> str:
        self._template = self._template or environment().from_string(self._source)
        return self._template.render(variables)


def _limit_resources() -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        resource.setrlimit(kind, (limit, limit))


def environment() -> Environment:
    """What templates of model directories are written for."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    # The type itself has attributes that reach further than templates should.
    made.globals["dict"] = _dict
    made.globals["strftime_now"] = _strftime_now
    return made


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the marked statements where the tag was."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


if __name__ == "__main__":
    main()
