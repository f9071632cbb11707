"""Times of the contract: seconds since 1970, where rows have microseconds."""

from typing import overload


@overload
def unix_s(time_us: int) -> int: ...


@overload
def unix_s(time_us: int | None) -> int | None: ...


def unix_s(time_us: int | None) -> int | None:
    """None for what was at no time yet."""
    return None if time_us is None else time_us // 1_000_000
