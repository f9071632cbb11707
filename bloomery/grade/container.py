"""The container of graders (level `L2`): bubblewrap, with the fork server of jails inside.

What a jail keeps from a grader by rules of the kernel is not there at all: no files but the interpreter, its libraries and its packages, no processes
but the fork server's, no network, queues or host name of the machine's, and a work directory in memory that is gone with the container.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import bloomery
from bloomery.grade.jail import READABLE, library_names

PROGRAM: Final = "bwrap"
INSTALL: Final = "install bubblewrap, for example with `apt-get install bubblewrap`"
LAYER: Final = "a container with nothing of the machine but Python, and with processes, network and IPC of its own"
WORK: Final = Path("/bloomery-graders")
"""The work directory of a fork server in there. The machine has none of this name, nor of another one: whoever is killed leaves nothing behind."""
_BESIDE_BYTES: Final = 1 << 30
"""That work directories may take beside what jails may have: what is held open but unlinked is measured by nobody."""
_NAMESPACES: Final = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "KILL", "SETGID", "SETUID")
"""Of a fork server that is root: to make jails other users, and to end and tidy up behind them."""


def missing() -> str | None:
    """Why there can be no container here, as far as one sees without trying; None: nothing is known."""
    if sys.platform != "linux":
        return f"containers are made of what Linux offers, and this is {sys.platform}"
    if shutil.which(PROGRAM):
        return None
    there = shutil.which(PROGRAM, mode=os.F_OK)
    return f"there is no `{PROGRAM}`: {INSTALL}" if there is None else f"`{there}` is not executable: make it so, or {INSTALL}"


def command(disk_bytes: int) -> list[str]:
    """What to put before the command of the fork server, whose work directory is `WORK`. `disk_bytes` is what all jails may have in it together: it
    is memory, of which half the machine's would be given out otherwise."""
    user = ["--unshare-user"]
    if os.geteuid() == 0:
        # In a user namespace it could make no jail another user.
        user = ["--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}"))]
    bound = [word for place in dict.fromkeys(_places()) for word in ("--ro-bind", place, place)]
    of_work = ("--perms", "0711", "--size", str(disk_bytes + _BESIDE_BYTES), "--tmpfs", str(WORK))
    own = (*("--proc", "/proc"), *("--dev", "/dev"), *of_work, *("--remount-ro", "/"), *("--chdir", "/"))
    return [shutil.which(PROGRAM) or PROGRAM, "--die-with-parent", *_NAMESPACES, "--hostname", "graders", *user, *bound, *own]


def _places() -> Iterator[str]:
    """Of the interpreter and what it imports, by every name under which it is looked for: an interpreter that does not find its library where its
    own path says takes another one's, as the distribution's."""
    interpreter, environment = Path(sys.executable), Path(sys.prefix) / "pyvenv.cfg"
    yield from map(str, _links(interpreter))
    for place in (environment, Path(bloomery.__file__).parent, *map(Path, READABLE), *map(Path, library_names())):
        if place.exists():
            yield from map(str, (place, place.resolve()))


def _links(place: Path) -> Iterator[Path]:
    """Of a file, every name on the way to it: none of them is a link in there."""
    yield place
    while place.is_symlink():
        place = place.parent / place.readlink()
        yield place
    yield place.resolve()
