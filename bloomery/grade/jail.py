"""The jail of one process on Linux: what it gives up, for good, before code of others runs in it.

`Ground` is found out once, by the fork server: which of the ways to lose one's identity this machine offers, and the places that may be read.
`Ground.confine` is called in a fresh fork. Three things every jail has, or there is none: no new privileges, Landlock, a seccomp allow list. Beside
them limits, an environment of its own, and a user who owns nothing else: another one where the server is root, else a user namespace.
"""

import os
import resource
import signal
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from bloomery.grade import landlock, seccomp
from bloomery.grade import work as work_directories
from bloomery.grade.libc import call

Level = Literal["L0", "L1", "L2", "L3"]
"""`L0`: in the caller's own process, for code one trusts. `L1`: this jail. `L2`: the same in a container. `L3`, another machine, is not offered."""
Identity = Literal["another user", "a user namespace", "the server's user"]

CHANNEL: Final = 3
"""The only descriptor beside 0, 1 and 2 that a jailed process has."""
_USERS: Final = range(1_879_048_192, 1_879_048_192 + (1 << 20))
"""Ids that no machine gives to people: each jail takes one, so that limits by user are limits of one jail."""
MOST_DESCRIPTORS: Final = 1024
"""That the fork server may have open, and a fork of it therefore."""
_THREADS: Final = 64
_OPEN_FILES: Final = 64
_KEEP_CAPABILITIES, _NO_NEW_PRIVILEGES, DEATH_SIGNAL = 8, 38, 1
_CAPABILITIES_VERSION: Final = 0x20080522
_READ_ANYTHING: Final = 1 << 2
_NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x08000000, 0x10000000, 0x40000000
READABLE: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES: Final = {"/dev/null": landlock.WRITE, "/dev/zero": landlock.READ, "/dev/urandom": landlock.READ, "/dev/random": landlock.READ}
ENVIRONMENT: Final = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Packages that would ask the network, and try again in the background while others import them.
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Of jails, beside places that are each one's own; the fork server takes it before it forks."""


class Confinement(NamedTuple):
    """Of one process, in units of the kernel."""

    memory_bytes: int
    cpu_s: int
    file_bytes: int


class Refused(Exception):
    """This machine gives no jail, and why."""


class Ground(NamedTuple):
    """What jails of this machine stand on."""

    abi: int
    """Of Landlock."""
    identity: Identity
    reads_as_root: bool
    """Whether the other user is left the capability to read what lies below directories of root's, where Landlock allows the place at all."""
    namespaces: tuple[str, ...]
    """That the fork server has left, and its children with it."""
    filter: seccomp.Filter
    readable: tuple[tuple[int, int], ...]
    """Open places and the rights on them."""

    def layers(self) -> list[str]:
        """What holds, for people."""
        user = {
            "another user": "a user of its own",
            "a user namespace": "a user namespace of its own",
            "the server's user": "the server's user without capabilities",
        }
        threads = f"at most {_THREADS} threads" if self.filter.threads else "no threads"
        left = [f"no {name} but its own" for name in self.namespaces]
        return ["no new privileges", f"Landlock ABI {self.abi}", "a seccomp allow list", "limits", user[self.identity], threads, *left]

    def user(self, number: int) -> int | None:
        """Who a jail's work directory belongs to, if not the server's user."""
        return _USERS[number % len(_USERS)] if self.identity == "another user" else None

    def confine(self, work: Path, number: int, limits: Confinement, parent: int) -> None:
        """Jail this process, whose only thread calls it; raises OSError if anything of it fails."""
        os.environ["HOME"] = os.environ["TMPDIR"] = str(work)
        _die_first_when_memory_is_short()
        self._become(number)
        os.chdir(work)
        _limit(limits, threads=self.filter.threads)
        # Behind the change of identity, which forgets it.
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        place = os.open(work, os.O_PATH | os.O_DIRECTORY)
        landlock.restrict(self.abi, [*self.readable, (place, landlock.WRITE)])
        os.closerange(CHANNEL + 1, MOST_DESCRIPTORS)
        self.filter.install(os.getpid())

    def _become(self, number: int) -> None:
        if self.identity == "another user":
            _become_another(_USERS[number % len(_USERS)], reads_as_root=self.reads_as_root)
        elif self.identity == "a user namespace":
            _unshare(_NEW_USER)
        _hold_capabilities(_READ_ANYTHING if self.reads_as_root else 0)


def found_ground(work: Path) -> Ground:
    """What this machine offers, tried out in throw-away children; leaves namespaces of this process. `work` is a directory for the trials."""
    if sys.platform != "linux":
        raise Refused(f"jails are made of what Linux offers, and this is {sys.platform}")
    if not seccomp.supported():
        raise Refused(f"there is no list of system calls for the processor {os.uname().machine}")
    try:
        abi = landlock.version()
    except OSError as error:
        raise Refused(f"the kernel offers no Landlock (Linux 5.13 or later, with `landlock` among the modules of `lsm=`): {error.strerror}") from None
    places = tuple(_open_places())
    namespaces = tuple(_leave_namespaces())
    failures = []
    for number, (identity, reads_as_root) in enumerate(_identities()):
        # Where nothing bounds the number of threads there are none.
        ground = Ground(abi, identity, reads_as_root, namespaces, seccomp.compiled(threads=identity != "the server's user"), places)
        if (failure := tried(partial(_trial, ground, work / f"trial-{number}"))) is None:
            return ground
        failures.append(f"as {identity}: {failure}")
    raise Refused("; ".join(failures))


def tried(what: Callable[[], object]) -> str | None:
    """Do it in a throw-away child; what went wrong there, if anything did."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writer, CHANNEL)
        said = ""
        try:
            what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:500]
        os.write(CHANNEL, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or (f"ended with status {os.waitstatus_to_exitcode(status)}" if status else None)


def _trial(ground: Ground, work: Path) -> None:
    """Whether a jail does its work and holds, from within."""
    entries = [entry for entry in sys.path if is_readable(entry)]
    work_directories.make(work, ground.user(0))
    ground.confine(work, 0, Confinement(memory_bytes=1 << 30, cpu_s=10, file_bytes=1 << 20), os.getppid())
    for entry in entries:
        next(Path(entry).iterdir(), None)
    (work / "file").write_text("text")
    if ground.filter.threads:
        started = threading.Thread(target=str)
        started.start()
        started.join()
    for name, forbidden in _FORBIDDEN.items():
        try:
            forbidden()
        except OSError:
            continue
        raise Refused(f"the jail does not hold: it can {name}")


def is_readable(entry: str) -> bool:
    """Whether a place that Python imports from is one that jails may read."""
    return Path(entry).is_dir() and any(Path(entry).resolve().is_relative_to(place) for place in library_places())


def _identities() -> Iterator[tuple[Identity, bool]]:
    """The better first. The second says whether the capability to read as root does is kept, which an interpreter below `/root` needs."""
    if os.geteuid() == 0:
        yield "another user", False
        yield "another user", True
    else:
        yield "a user namespace", False
    yield "the server's user", False


def _leave_namespaces() -> Iterator[str]:
    """Of network and IPC. A jail has neither sockets nor queues anyway, so that a kernel which forbids this forbids no jail."""
    inside = 0 if os.geteuid() == 0 else _NEW_USER
    for name, kind in (("network", _NEW_NETWORK), ("IPC", _NEW_IPC)):
        if tried(partial(_unshare, inside | kind)) is None:
            _unshare(inside | kind)
            inside = 0
            yield name


def _unshare(kinds: int) -> None:
    user, group = os.geteuid(), os.getegid()
    call("unshare", kinds)
    if kinds & _NEW_USER:
        # Unmapped users can make no files.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become_another(user: int, *, reads_as_root: bool) -> None:
    if reads_as_root:
        call("prctl", _KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _hold_capabilities(held: int) -> None:
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    call("capset", header, struct.pack("6I", held, held, 0, 0, 0, 0))


def _limit(limits: Confinement, *, threads: bool) -> None:
    bounds = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # Counted for one user in one namespace, so that it counts where a jail has one of its own.
        **({resource.RLIMIT_NPROC: _THREADS} if threads else {}),
    }
    for kind, most in bounds.items():
        resource.setrlimit(kind, (most, most))
    # The first number is a signal that can be caught, the second one that cannot.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def library_names() -> list[str]:
    """Of the places in which the interpreter, its libraries and the packages lie that graders may import, as they are looked for."""
    of_python = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), f"{sys.base_prefix}/lib")
    # A virtual environment may see packages of another one behind its own.
    packages = (entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    return [place for place in (*READABLE, *of_python, *packages) if Path(place).exists()]


def library_places() -> list[Path]:
    """The same without symbolic links."""
    return [Path(place).resolve() for place in library_names()]


def _open_places() -> Iterator[tuple[int, int]]:
    for place in dict.fromkeys(library_places()):
        yield os.open(place, os.O_PATH | os.O_CLOEXEC), landlock.READ
    for device, access in _DEVICES.items():
        if Path(device).exists():
            yield os.open(device, os.O_PATH | os.O_CLOEXEC), access


def _die_first_when_memory_is_short() -> None:
    try:
        place = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(place, b"1000")
        os.close(place)
    except OSError:
        # Where there is no /proc the kernel chooses by size.
        return


_FORBIDDEN: Final[dict[str, Callable[[], object]]] = {
    "read /etc/passwd": Path("/etc/passwd").read_bytes,
    "list the root directory": lambda: [*Path("/").iterdir()],
    "make a socket": socket.socket,
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "start a process": os.fork,
}
"""What every jail is asked before it is relied on."""
