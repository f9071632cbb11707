"""The filter of system calls, run by an interpreter of its few instructions: for both processors, whichever this machine has."""

import platform
import struct
from collections.abc import Iterator

import pytest

from bloomery.grade import seccomp

PID = 4321
ALLOWED, EPERM, ENOSYS, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    seccomp.numbers.cache_clear()
    yield request.param
    seccomp.numbers.cache_clear()


def verdict(machine: str, number: int, *arguments: int, threads: bool = True, architecture: int | None = None) -> int:
    """What the kernel would do."""
    code = seccomp.compiled(threads=threads).program(PID)
    program = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    at = register = 0
    while True:
        kind, when_true, when_false, value = program[at]
        at += 1
        match kind:
            case 0x20:
                (register,) = struct.unpack_from("=I", data, value)
            case 0x54:
                register &= value
            case 0x06:
                return int(value)
            case _:
                holds = {0x15: register == value, 0x25: register > value, 0x35: register >= value, 0x45: bool(register & value)}[kind]
                at += when_true if holds else when_false


def test_every_call_without_a_condition_is_allowed_and_every_other_one_refused(machine: str) -> None:
    known = seccomp.numbers()
    conditional = {"kill", "tgkill", "clone", "clone3", "fcntl", "ioctl", "prctl", "prlimit64", "sendto", "socketpair"}
    free = {number for name, number in known.items() if name not in conditional}
    assert len(free) > 90
    for number in set(range(500)) - {known[name] for name in conditional}:
        assert verdict(machine, number, 1, 2, 3) == (ALLOWED if number in free else ENOSYS if number > 450 else EPERM), number


def test_another_architecture_and_its_numbers_end_the_process(machine: str) -> None:
    for other in {*ARCHITECTURES.values(), 0x40000003} - {ARCHITECTURES[machine]}:
        assert verdict(machine, 0, architecture=other) == KILLED
    assert verdict(machine, 0x40000000 | seccomp.numbers()["read"]) == KILLED


def test_conditions_look_at_arguments(machine: str) -> None:
    at = seccomp.numbers()
    own = {name: verdict(machine, at[name], PID, 9) for name in ("kill", "tgkill", "prlimit64")}
    assert set(own.values()) == {ALLOWED}
    assert verdict(machine, at["prlimit64"], 0) == ALLOWED
    for name in ("kill", "tgkill", "prlimit64"):
        assert {verdict(machine, at[name], who) for who in (1, PID + 1, 0xFFFFFFFF)} == {EPERM}
    assert verdict(machine, at["kill"], 0) == EPERM
    thread = 0x3D0F00
    assert verdict(machine, at["clone"], thread) == ALLOWED
    assert verdict(machine, at["clone"], thread, threads=False) == EPERM
    assert {verdict(machine, at["clone"], flags) for flags in (0, 17, 0x4111, thread | 0x10000000, thread | 0x40000000)} == {EPERM}
    assert verdict(machine, at["clone3"]) == ENOSYS
    assert verdict(machine, at["sendto"], 3, 0, 0, 0, 0) == ALLOWED
    assert {verdict(machine, at["sendto"], 3, 0, 0, 0, address) for address in (1, 1 << 32)} == {EPERM}
    assert verdict(machine, at["socketpair"], 1, 1 | 0o2004000) == ALLOWED
    assert {verdict(machine, at["socketpair"], family, kind) for family, kind in ((1, 2), (1, 5), (2, 1), (16, 3))} == {EPERM}
    assert verdict(machine, at["ioctl"], 1, 0x5401) == ALLOWED
    assert verdict(machine, at["ioctl"], 1, 0x5412) == EPERM
    assert verdict(machine, at["fcntl"], 1, 3) == ALLOWED
    assert verdict(machine, at["fcntl"], 1, 8) == EPERM
    assert verdict(machine, at["prctl"], 15) == ALLOWED
    assert {verdict(machine, at["prctl"], option) for option in (1, 4, 8, 22, 38, 47)} == {EPERM}
