"""What tells that an operation is the same as one before, though it comes under another number."""

from blake3 import blake3

from bloomery.types.operations import Operation
from bloomery.types.wire import encode


def fingerprint(operation: Operation) -> str:
    """The same for an operation that is sent again."""
    return blake3(encode(operation)).hexdigest()[:32]
