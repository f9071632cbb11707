"""The one error tree: raise where you know, answer at the door (only the `errors` of a contract map codes to HTTP)."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from bloomery.types.ids import NAME

Category = Literal["user", "server"]

_DIRECTORIES: Final = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+")
"""Of an absolute path, as it stands in a text."""
_QUOTED_DIRECTORIES: Final = re.compile(r"(['\"])/(?:(?!\1).)*/")
"""The same where quotes say how far it goes: then it may hold anything."""
_REASON_CHARS: Final = 1000
"""Messages go over sockets in frames and are kept with results: what a library says may be of any length, and the log has all of it."""


class BloomeryError(Exception):
    """Something went wrong and the message tells the caller what to change."""

    code: ClassVar[str] = "internal"
    category: ClassVar[Category] = "server"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidInput(BloomeryError):
    """The request is malformed or impossible; `field` names the part to change."""

    code, category = "invalid", "user"


class TooLarge(InvalidInput):
    """More than is taken at a time."""

    code = "too_large"


class RateLimited(BloomeryError):
    """The key has used what it may use in a minute: of `resource`, and there is some again after `retry_after_s`."""

    code, category = "rate_limit_exceeded", "user"

    def __init__(self, message: str, *, field: str | None = None, resource: str = "requests", retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.resource, self.retry_after_s = resource, retry_after_s

    @property
    def retry_after(self) -> str:
        """The same as whole seconds, and never a moment too early."""
        return str(max(1, math.ceil(self.retry_after_s)))


class NotFound(BloomeryError):
    """No such thing, or not the caller's."""

    code, category = "not_found", "user"


class Conflict(BloomeryError):
    """The thing is in a state that forbids this."""

    code, category = "conflict", "user"


class Unauthorized(BloomeryError):
    """No key, or a wrong one."""

    code, category = "unauthorized", "user"


class InvalidToken(Unauthorized):
    """A token that this server did not sign, or whose time is over: exchange the key for another."""


class Forbidden(BloomeryError):
    """The key lacks the scope, or a browser's request does not prove that it comes from the page of this server."""

    code, category = "forbidden", "user"


class NotSupported(BloomeryError):
    """Understood, and not offered (yet): refused rather than ignored."""

    code, category = "not_supported", "user"


class Gone(BloomeryError):
    """It existed and cannot be had any more; submit again."""

    code, category = "gone", "user"


class Unavailable(BloomeryError):
    """Whoever should answer is away or full; the message names who. Trying again helps."""

    code = "unavailable"


class Corrupt(BloomeryError):
    """Stored data fails its checksum; the message names the file."""

    code = "corrupt"


class Stopped(Corrupt):
    """What is damaged was found before: the log says so there, and nothing is read again until the server is started again."""


class WorkerError(BloomeryError):
    """A foreign error inside a worker, with the operation it belongs to."""

    code = "worker"


class Deadly(WorkerError):
    """Whoever worked on this request went away, again and again: it may be what kills, so nobody is to repeat it unasked."""


def _by_code(kind: type[BloomeryError]) -> dict[str, type[BloomeryError]]:
    """Of a class and those below it; one that has its parent's code stands behind its parent."""
    below = [_by_code(each) for each in kind.__subclasses__()]
    return {code: found for each in below for code, found in each.items()} | {kind.code: kind}


BY_CODE: Final = {code: kind for code, kind in _by_code(BloomeryError).items() if kind is not BloomeryError}
"""The class that has a code. One who is told no more than that something went wrong knows better where, so the root is not among them."""


def code_of(error: Exception) -> str:
    """What an error is told of by; whatever is not ours is the server's."""
    return error.code if isinstance(error, BloomeryError) else BloomeryError.code


@contextmanager
def blame(kind: type[BloomeryError], what: str) -> Iterator[None]:
    """Wrap foreign errors as `kind` naming `what` was being done; pass ours through."""
    try:
        yield
    except BloomeryError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {reason(error)}") from error


@contextmanager
def naming(field: str, *kinds: type[BloomeryError]) -> Iterator[None]:
    """Have errors of these kinds, or of any, name the field that the caller gave: who raises them knows it by another name, or by none."""
    try:
        yield
    except BloomeryError as error:
        if not kinds or isinstance(error, kinds):
            error.field = field
        raise


def misfit(problem: Mapping[str, Any], given: Any) -> InvalidInput:
    """What pydantic found wrong, by the path of the field as it was written: tags of unions, which pydantic puts between, are left out."""
    *above, last = problem["loc"]
    path: list[str] = []
    for part in above:
        if _has(given, part):
            given = given[part]
            path.append(str(part))
    if problem["type"] == "missing" or _has(given, last):
        path.append(str(last))
    field = ".".join(path)
    says = _plainly(problem)
    return InvalidInput(f"`{field}`: {says}" if field else says, field=field or None)


def _plainly(problem: Mapping[str, Any]) -> str:
    """What pydantic says, without its words about Python."""
    of = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "this is missing"
        case "model_attributes_type":
            return "this has fields of its own, so it is an object"
        case "too_short":
            return f"at least {of['min_length']} {'item is' if of['min_length'] == 1 else 'items are'} needed, not {of['actual_length']}"
        case "string_pattern_mismatch" if of["pattern"] == NAME:
            return "a name is letters, digits, `.`, `_` and `-`, and begins with a letter or a digit"
    return str(problem["msg"]).removeprefix("Value error, ")


def _has(given: Any, part: str | int) -> bool:
    if isinstance(given, Mapping):
        return part in given
    return isinstance(given, Sequence) and not isinstance(given, str | bytes) and isinstance(part, int) and part < len(given)


def shown(name: str, chars: int = 64) -> str:
    """What a caller called something, as messages repeat it: they are kept, and names that there are have no more characters."""
    return name if len(name) <= chars else f"{name[: chars - 3]}..."


def reason(error: BaseException) -> str:
    """What a foreign error says, as callers may read it: not at any length, and of a file the name, and not where the server keeps it."""
    said = str(error)
    if isinstance(error, OSError):
        for path in (error.filename, error.filename2):
            if isinstance(path, str | bytes | os.PathLike):
                said = said.replace(repr(path), repr(Path(os.fsdecode(path)).name))
    # Cut last: what is left of a directory that was cut in the middle would not be taken for one.
    return shown(_DIRECTORIES.sub("", _QUOTED_DIRECTORIES.sub(r"\1", said)), _REASON_CHARS)
