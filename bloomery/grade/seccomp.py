"""The system calls that a jailed process may make: an allow list, so that what kernels add later is refused until somebody has read about it.

Refused calls fail with EPERM. Those newer than this list, and `clone3`, whose flags a filter cannot read, fail with ENOSYS, for which libraries have
an older way. What is allowed conditionally stands in `_conditions`, by what the arguments are.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from bloomery.grade.libc import call

_TABLE: Final = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287
    close:3:57 close_range:436:436 lseek:8:62 fstat:5:80 stat:4: lstat:6: newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 poll:7:
    ppoll:271:73 select:23: pselect6:270:72 epoll_create:213: epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232: epoll_pwait:281:22
    epoll_pwait2:441:441 eventfd:284: eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 pipe:22: pipe2:293:59
    dup:32:23 dup2:33: dup3:292:24 flock:73:32 fsync:74:82 fdatasync:75:83 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 open:2:
    openat:257:56 creat:85: access:21: faccessat:269:48 faccessat2:439:439 getdents:78: getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50
    mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38 renameat2:316:276 link:86: linkat:265:37
    symlink:88: symlinkat:266:36 readlink:89: readlinkat:267:78 umask:95:166 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216
    madvise:28:233 mincore:27:232 brk:12:214 msync:26:227 membarrier:324:283 futex:202:98 set_robust_list:273:99 get_robust_list:274:100
    rseq:334:293 set_tid_address:218:96 gettid:186:178 getpid:39:172 getppid:110:173 getpgid:121:155 getpgrp:111: getsid:124:156 getuid:102:174
    geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getrlimit:97:163 getrusage:98:165
    times:100:153 sysinfo:99:179 uname:63:160 getrandom:318:278 getcpu:309:168 clock_gettime:228:113 clock_getres:229:114
    clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201: alarm:37: setitimer:38:103 getitimer:36:102 pause:34:
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133
    sigaltstack:131:132 restart_syscall:219:128 exit:60:93 exit_group:231:94 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
    sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 arch_prctl:158: sendfile:40:71
    copy_file_range:326:285 wait4:61:260 waitid:247:95 recvfrom:45:207 shutdown:48:210 getsockname:51:204 getsockopt:55:209 kill:62:129
    tgkill:234:131 clone:56:220 clone3:435:435 fcntl:72:25 ioctl:16:29 prctl:157:167 prlimit64:302:261 sendto:44:206 socketpair:53:199
"""
"""`name:number on x86-64:number on aarch64`, which has no number for calls that newer ones replaced."""
_MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of the architecture, and its column of the table."""
_X32: Final = 0x40000000
"""Numbers from here on are those of another ABI with the same calls."""
_NEWEST: Final = 450

_LOAD, _EQUAL, _MORE, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SET_SECCOMP, _FILTER = 22, 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_UNKNOWN: Final = 0x00050000 | errno.ENOSYS
_KILL: Final = 0x80000000

_CLONE_THREAD: Final = 0x10000
_CLONE_NAMESPACES: Final = 0x7E020000
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0o2004000
_IOCTLS: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS (is it a terminal?), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_FCNTLS: Final = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Copies of descriptors, flags, locks and the size of pipes: none that sends signals."""
_PRCTLS: Final = (15, 16, 0x53564D41)
"""Names of threads and of mappings. Not the signal at a parent's death, which must stay."""

_OF_ITSELF: Final = ("kill", "tgkill", "prlimit64")
"""Calls that a process may make about itself."""

_Instruction = tuple[int, int, int, int]


class Filter(NamedTuple):
    """Compiled for this machine, in two parts, between which `program` puts what depends on the process."""

    before: bytes
    after: bytes
    threads: bool
    """Whether they may be started."""

    def program(self, pid: int) -> bytes:
        """All of it, for one process."""
        of_itself = {"kill": _one_of(0, (pid,)), "tgkill": _one_of(0, (pid,)), "prlimit64": _one_of(0, (0, pid))}
        return self.before + _packed(_rules(of_itself)) + self.after

    def install(self, pid: int) -> None:
        """For this process, for good. It has promised before to gain no privileges."""
        program = self.program(pid)
        code = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        call("prctl", _SET_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0)


def compiled(*, threads: bool) -> Filter:
    """What is the same for all processes."""
    architecture, _ = _machine()
    before: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_AT_LEAST, 0, 1, _NEWEST + 1),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    conditions = _conditions(threads)
    allowed = sorted(number for name, number in numbers().items() if name not in {*conditions, *_OF_ITSELF})
    after = [*_rules(conditions), *(step for first, last in _runs(allowed) for step in _run(first, last)), (_RETURN, 0, 0, _REFUSE)]
    return Filter(_packed(before), _packed(after), threads)


def _runs(allowed: list[int]) -> Iterator[tuple[int, int]]:
    """Numbers that follow each other, as their first and last: the kernel walks through the filter for every number when it takes it."""
    first = last = allowed[0]
    for number in allowed[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _run(first: int, last: int) -> list[_Instruction]:
    """In ascending order: whatever is no more than the last and less than the first lies between two runs."""
    return [(_MORE, 3, 0, last), (_AT_LEAST, 0, 1, first), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]


@cache
def numbers() -> dict[str, int]:
    """Of the calls that are named here, on this machine."""
    _, column = _machine()
    rows = [row.split(":") for row in _TABLE.split()]
    return {name: int(found[column]) for name, *found in rows if found[column]}


def supported() -> bool:
    """Whether the list has a column for this processor."""
    return platform.machine() in _MACHINES


def _machine() -> tuple[int, int]:
    if not supported():
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    return _MACHINES[platform.machine()]


def _conditions(threads: bool) -> dict[str, list[_Instruction]]:
    thread = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 2, 0, _CLONE_NAMESPACES),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    # An address would reach a socket of somebody else by its path.
    no_address = [
        (_LOAD, 0, 0, _ARGUMENTS + 32),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _ARGUMENTS + 36),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    stream_pair = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUAL, 0, 4, _AF_UNIX),
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_AND, 0, 0, 0xFFFFFFFF & ~_SOCK_FLAGS),
        (_EQUAL, 0, 1, _SOCK_STREAM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return {
        "clone": thread if threads else [(_RETURN, 0, 0, _REFUSE)],
        "clone3": [(_RETURN, 0, 0, _UNKNOWN)],
        "fcntl": _one_of(1, _FCNTLS),
        "ioctl": _one_of(1, _IOCTLS),
        "prctl": _one_of(0, _PRCTLS),
        "sendto": no_address,
        "socketpair": stream_pair,
    }


def _rules(conditions: Mapping[str, list[_Instruction]]) -> list[_Instruction]:
    """Each ends with a verdict, so that what follows it has the number of the call before it again."""
    return [step for name, rule in conditions.items() for step in ((_EQUAL, 0, len(rule), numbers()[name]), *rule)]


def _one_of(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]


def _packed(program: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in program)
