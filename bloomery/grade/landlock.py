"""Landlock: what of the file system a process may reach, and that it signals nobody outside. Rules are for good, and children inherit them.

What Landlock does not know (modes, owners, attributes, `stat`) is the business of `seccomp` and of the user that a jail runs as.
"""

import os
import stat
import struct
from collections.abc import Sequence
from typing import Final

from bloomery.grade.libc import call

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
"""System calls, the same on every architecture."""
_VERSION: Final = 1
_BENEATH_PATH: Final = 1

_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_REGULAR, _MAKE_SYMLINK = 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST_ACCESSES: Final = (1 << 13) - 1
_LATER_ACCESSES: Final = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEVICE}
"""By the version of the interface that knows them."""
_NETWORK_SINCE, _BIND_AND_CONNECT = 4, 3
_SCOPES_SINCE, _SOCKETS_AND_SIGNALS = 6, 3

READ: Final = _READ_FILE | _READ_DIR
WRITE: Final = READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REGULAR | _MAKE_SYMLINK | _REFER | _TRUNCATE
_OF_FILES: Final = _READ_FILE | _WRITE_FILE | _TRUNCATE


def version() -> int:
    """Of the interface of this kernel; raises OSError where it has none, or where it is off."""
    return call("syscall", _CREATE, None, 0, _VERSION)


def restrict(abi: int, rules: Sequence[tuple[int, int]]) -> None:
    """Leave this process these rights beneath these places (open descriptors), and none elsewhere. It has promised before to gain no privileges."""
    handled = _FIRST_ACCESSES
    for since, access in _LATER_ACCESSES.items():
        handled |= access if abi >= since else 0
    sizes = 8 + 8 * (abi >= _NETWORK_SINCE) + 8 * (abi >= _SCOPES_SINCE)
    attributes = struct.pack("QQQ", handled, _BIND_AND_CONNECT, _SOCKETS_AND_SIGNALS)[:sizes]
    ruleset = call("syscall", _CREATE, attributes, len(attributes), 0)
    for place, access in rules:
        possible = handled if stat.S_ISDIR(os.fstat(place).st_mode) else handled & _OF_FILES
        call("syscall", _ADD_RULE, ruleset, _BENEATH_PATH, struct.pack("=Qi", access & possible, place), 0)
    call("syscall", _RESTRICT, ruleset, 0)
    os.close(ruleset)
