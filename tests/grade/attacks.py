"""What graders try that they must not: one entry each, with what comes of it. `docs/security.md` has a row for every one.

Sources get by the row where things are that somebody would want. Where one gives a number, it counts what got through, and 0 is what is wanted.
"""

import platform
from textwrap import dedent
from typing import Final, NamedTuple

from bloomery.types.grading import FailureKind


class Attack(NamedTuple):
    """`kind` None: it gives the score 0 for nothing that got through. `says` is found in the failure's detail."""

    name: str
    source: str
    kind: FailureKind | None = None
    says: str = ""
    only_itself: bool = True
    """Whether it harms its own grade alone, so that another of the same batch has its score."""


_READ: Final = """
    from pathlib import Path
    def grade(item):
        read = 0
        for place in item["places"]:
            try:
                read += bool([*Path(place).iterdir()] if Path(place).is_dir() else Path(place).read_bytes() is not None)
            except OSError:
                pass
        return read
"""
_CALLS: Final = """
    import ctypes, errno
    libc = ctypes.CDLL(None, use_errno=True)
    def grade(item):
        taken = 0
        for number, *arguments in item["calls"]:
            # Arguments that mean nothing would be refused with other errors by a kernel that looks at them.
            given = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments))
            taken += given != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
        return taken
"""
_WRITE_TO_CHANNEL: Final = """
    import json, os, struct
    def grade(item):
        frame = json.dumps({frame}).encode()
        os.write(3, struct.pack(">I", len(frame)) + frame)
        return 0.25
"""
_ON_X86: Final = platform.machine() == "x86_64"

CALLS: Final = {
    "keyctl, add_key, request_key": ((250, 0, 0, 0), (248,), (249,)) if _ON_X86 else ((219, 0, 0, 0), (217,), (218,)),
    "bpf, perf_event_open": ((321, 0, 0, 0), (298,)) if _ON_X86 else ((280, 0, 0, 0), (241,)),
    "mount, umount, pivot_root, chroot, new mount calls": (
        ((165,), (166,), (155,), (161,), (428,), (429,), (430,), (432,)) if _ON_X86 else ((40,), (39,), (41,), (51,), (428,), (429,), (430,), (432,))
    ),
    "unshare, setns": ((272, 0x10000000), (308, 0, 0)) if _ON_X86 else ((97, 0x10000000), (268, 0, 0)),
    "io_uring": ((425, 8, 0), (426,), (427,)),
    "userfaultfd, memfd_create, memfd_secret": ((323, 0), (319, 0, 0), (447, 0)) if _ON_X86 else ((282, 0), (279, 0, 0), (447, 0)),
    "ptrace, process_vm_readv, process_vm_writev, kcmp": ((101, 0, 0, 0, 0), (310,), (311,), (312,))
    if _ON_X86
    else ((117, 0, 0, 0, 0), (270,), (271,), (272,)),
    "pidfd_open, pidfd_getfd, pidfd_send_signal": ((434, 1, 0), (438, 0, 0, 0), (424, 0, 0, 0, 0)),
    "open_by_handle_at, name_to_handle_at": ((304, 0, 0, 0), (303,)) if _ON_X86 else ((265, 0, 0, 0), (264,)),
    "identities: setuid, setgid, setgroups, capset": ((105, 0), (106, 0), (116, 0, 0), (126, 0, 0))
    if _ON_X86
    else ((146, 0), (144, 0), (159, 0, 0), (91, 0, 0)),
    "queues and memory that outlive a process: shmget, semget, msgget, mq_open": (
        ((29, 0, 4096, 0o1600), (64, 0, 1, 0o1600), (68, 0, 0o1600), (240,))
        if _ON_X86
        else ((194, 0, 4096, 0o1600), (190, 0, 1, 0o1600), (186, 0, 0o1600), (180,))
    ),
    "the signal at a parent's death: prctl": ((157, 1, 0, 0, 0, 0),) if _ON_X86 else ((167, 1, 0, 0, 0, 0),),
    "modules, reboot, clocks, host name, personality": (
        ((175,), (169,), (227,), (170,), (135, 0x20000)) if _ON_X86 else ((105,), (142,), (112,), (161,), (92, 0x20000))
    ),
}
"""System calls by number, none of which may succeed."""

ATTACKS: Final = (
    Attack("read /etc/passwd, /root, the data directory, the source of Bloomery", _READ),
    Attack("read /proc: environment, memory and descriptors of others and of itself", _READ),
    Attack(
        "environment variables",
        """
        import os
        def grade(item):
            threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
            return len(set(os.environ) - threads - {"LANG", "HOME", "TMPDIR", "HF_HUB_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"})
        """,
    ),
    Attack(
        "secrets in the memory of the server it was forked from",
        """
        import gc
        def grade(item):
            return sum(item["secret"][::-1] in each for each in gc.get_objects() if isinstance(each, (list, tuple, set, dict)))
        """,
    ),
    Attack(
        "write outside of its directory",
        """
        from pathlib import Path
        def grade(item):
            written = 0
            for place in [*item["directories"], "/tmp", "/var/tmp", "/dev/shm", "/", ".."]:
                try:
                    (Path(place) / "left behind").write_text("text")
                    written += 1
                except OSError:
                    pass
            return written
        """,
    ),
    Attack(
        "change modes, owners, times and attributes of others' files",
        """
        import os
        def grade(item):
            changed = 0
            for place in item["places"]:
                for change in (lambda: os.chmod(place, 0o777), lambda: os.chown(place, 0, 0), lambda: os.utime(place), lambda: os.truncate(place, 0),
                               lambda: os.setxattr(place, "user.a", b"b"), lambda: os.unlink(place), lambda: os.rename(place, "here")):
                    try:
                        change()
                        changed += 1
                    except OSError:
                        pass
            return changed
        """,
    ),
    Attack(
        "symbolic and hard links out of its directory",
        """
        import os
        from pathlib import Path
        def grade(item):
            read = 0
            for number, place in enumerate(item["places"]):
                for link in (os.symlink, os.link):
                    try:
                        link(place, f"{link.__name__}{number}")
                        read += bool(Path(f"{link.__name__}{number}").open("rb"))
                    except OSError:
                        pass
            return read
        """,
    ),
    Attack(
        "sockets: internet, unix, netlink, packets",
        """
        import socket
        def grade(item):
            made = 0
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                    try:
                        socket.socket(family, kind)
                        made += 1
                    except OSError:
                        pass
            return made
        """,
    ),
    Attack(
        "a socket of a pair sent to, or connected with, one outside",
        """
        import socket
        def grade(item):
            reached = 0
            ours, theirs = socket.socketpair()
            for reach in (lambda: ours.connect(item["socket"]), lambda: ours.bind("here"), lambda: ours.sendto(b"text", item["socket"]),
                          lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)):
                try:
                    reach()
                    reached += 1
                except OSError:
                    pass
            return reached
        """,
    ),
    Attack("allocate 3 GB", "def grade(output):\n    return len(bytearray(3 << 30))", "memory", "MemoryError"),
    Attack(
        "allocate 3 GB and catch the error",
        """
        def grade(output):
            kept = []
            try:
                while True:
                    kept.append(bytearray(1 << 26))
            except MemoryError:
                return float(len(kept) >= 48)
        """,
    ),
    Attack(
        "start processes: fork, vfork, exec, subprocess, multiprocessing",
        """
        import multiprocessing, os, subprocess
        def grade(item):
            started = 0
            for start in (os.fork, lambda: os.execv("/bin/true", ["true"]), lambda: subprocess.run(["/bin/true"]),
                          lambda: os.posix_spawn("/bin/true", ["true"], {}), lambda: multiprocessing.get_context("fork").Process(target=str).start()):
                try:
                    start()
                    started += 1
                except OSError:
                    pass
            return started
        """,
    ),
    Attack(
        "a fork bomb",
        """
        import os
        def grade(output):
            while True:
                os.fork()
        """,
        "raised",
        "PermissionError",
    ),
    Attack(
        "a thousand threads",
        """
        import threading
        def grade(output):
            stop = threading.Event()
            started = 0
            threading.stack_size(32 << 10)
            try:
                for started in range(1000):
                    threading.Thread(target=stop.wait, daemon=True).start()
            except RuntimeError:
                pass
            stop.set()
            return float(started > 64)
        """,
    ),
    Attack(
        "signal its parent, the server, everybody",
        """
        import os, signal
        def grade(item):
            sent = 0
            for pid in (os.getppid(), item["pid"], 1, 0, -1):
                for send in (lambda: os.kill(pid, 0), lambda: os.kill(pid, signal.SIGTERM), lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9)):
                    try:
                        send()
                        sent += 1
                    except (OSError, ValueError):
                        pass
            return sent
        """,
    ),
    Attack(
        "limits and priorities of others",
        """
        import os, resource
        def grade(item):
            changed = 0
            for change in (lambda: resource.prlimit(item["pid"], resource.RLIMIT_NOFILE, (1, 1)),
                           lambda: os.setpriority(os.PRIO_PROCESS, item["pid"], 19), lambda: os.sched_setaffinity(item["pid"], {0}),
                           lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))):
                try:
                    change()
                    changed += 1
                except (OSError, ValueError):
                    pass
            return changed
        """,
    ),
    *(Attack(name, _CALLS) for name in CALLS),
    Attack(
        "descriptors that it was not given",
        """
        import fcntl, stat, os
        def grade(item):
            others = 0
            for descriptor in range(4, 1024):
                try:
                    fcntl.fcntl(descriptor, fcntl.F_GETFD)
                    others += 1
                except OSError:
                    pass
            return others
        """,
    ),
    Attack(
        "print without end",
        """
        import os, sys
        def grade(output):
            for _ in range(100):
                print("text" * 10_000)
                print("text" * 10_000, file=sys.stderr)
                os.write(1, b"text" * 10_000)
            return None
        """,
        "no_score",
        r"^the score is None\nit printed: (text){500}$",
    ),
    Attack("what is printed looks like a result", 'def grade(output):\n    print(\'{"token": "", "outcomes": [{"score": 1.0}]}\')\n    return 0.0'),
    Attack(
        "a result without its token in the channel",
        _WRITE_TO_CHANNEL.replace("{frame}", '{"token": "0" * 32, "outcomes": [{"score": 1.0, "reason": None, "metrics": {}}]}'),
        "killed",
        "wrote into its channel",
    ),
    Attack(
        "a frame without an end in the channel",
        'import os\ndef grade(output):\n    os.write(3, b"\\xff" * 100)\n    return 1.0',
        "killed",
        "wrote into its channel",
    ),
    Attack(
        "what is no JSON, and JSON too deep to be read, in the channel",
        'import os, struct\ndef grade(output):\n    os.write(3, struct.pack(">I", 60_000) + b"[" * 60_000)\n    return 1.0',
        "killed",
        "wrote into its channel",
    ),
    Attack(
        "millions of frames in the channel",
        """
        import os, struct
        def grade(output):
            frame = b'{"said": ""}'
            while True:
                os.write(3, (struct.pack(">I", len(frame)) + frame) * 5000)
        """,
        "killed",
        "wrote into its channel|longer than",
    ),
    Attack(
        "frames that say nothing in the channel, one behind the other without end",
        """
        import os, struct
        def grade(output):
            frame = b'{"said": ""}'
            while True:
                os.write(3, (struct.pack(">I", len(frame)) + frame) * 20)
        """,
        "killed",
        "wrote into its channel",
    ),
    Attack(
        "a score of a kind of its own behind the module's back",
        """
        import bloomery.grade.calling as calling
        calling.scored = lambda given: {"score": "1", "reason": None, "metrics": {}, "usage": {}}
        def grade(output):
            return 0.0
        """,
        "wrong_type",
        "no score",
        only_itself=False,
    ),
    Attack("sys.exit", "import sys\ndef grade(output):\n    sys.exit(0)", "raised", "SystemExit"),
    Attack("os._exit", "import os\ndef grade(output):\n    os._exit(0)", "killed", "with status 0 before there was a score"),
    Attack("a segmentation fault", "import ctypes\ndef grade(output):\n    ctypes.string_at(0)", "killed", "SIGSEGV"),
    Attack("kill itself", "import os\ndef grade(output):\n    os.kill(os.getpid(), 9)", "killed", "SIGKILL"),
    Attack("a loop without end", "def grade(output):\n    print('here')\n    while True: pass", "timeout", "longer than .* s\nit printed: here"),
    Attack("sleep", "import time\ndef grade(output):\n    time.sleep(1000)", "timeout", "longer than"),
    Attack(
        "catch everything, signals too, and go on",
        """
        import signal
        for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        def grade(output):
            while True:
                try:
                    while True: pass
                except BaseException:
                    pass
        """,
        "timeout",
        "longer than",
    ),
    Attack(
        "a thread that goes on, and work at the exit",
        """
        import atexit, threading, time
        def grade(output):
            atexit.register(time.sleep, 1000)
            threading.Thread(target=time.sleep, args=(1000,)).start()
            return 0.0
        """,
    ),
    Attack("a stack without end", "def grade(output):\n    return grade(output)", "raised", "RecursionError"),
    Attack(
        "a score that equals everything",
        """
        class Anything(str):
            def __eq__(self, other): return True
            def __hash__(self): return 0
        def grade(output):
            return Anything("1.0")
        """,
        "wrong_type",
        "a Anything, and not a number",
    ),
    Attack(
        "a number that is another one each time",
        """
        class Number(float):
            def __float__(self): return self
            def __add__(self, other): return 1.0
            def __repr__(self): return "1.0"
        def grade(output):
            return Number(0.0)
        """,
    ),
    Attack(
        "an error that raises when it is told",
        """
        class Worse(Exception):
            def __str__(self): raise SystemExit
        def grade(output):
            raise Worse
        """,
        "raised",
        "Worse",
    ),
    Attack(
        "close all descriptors",
        "import os\ndef grade(output):\n    os.closerange(0, 100)\n    return 1.0",
        "killed",
        "it closed its channel|with status",
    ),
    Attack(
        "fill the disk with one file",
        "def grade(output):\n    with open('file', 'wb') as file:\n        while True: file.write(bytes(1 << 20))",
        "raised",
        "File too large",
    ),
    Attack(
        "fill the disk with many files",
        """
        import time
        def grade(output):
            for number in range(64):
                with open(str(number), "wb") as file:
                    file.write(bytes(4 << 20))
            time.sleep(1000)
        """,
        "killed",
        "bytes, or too many files",
    ),
    Attack(
        "directories as deep as they go",
        """
        import os, time
        def grade(output):
            for _ in range(3000):
                os.mkdir("d" * 200)
                os.chdir("d" * 200)
            time.sleep(1000)
        """,
        "killed",
        "bytes, or too many files",
    ),
)


def source(attack: Attack) -> str:
    return dedent(attack.source)
