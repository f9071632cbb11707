"""What all bodies of the contract have in common."""

import msgspec


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not named is refused."""
