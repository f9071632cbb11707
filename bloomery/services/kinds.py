"""What rows say of checkpoints and runs, word by word as it stands in the database."""

from typing import Final

NAMED: Final = "named"
"""Of a checkpoint: a resumable state that its caller named."""
SNAPSHOT: Final = "snapshot"
"""A published version, named or not."""
EXTERNAL: Final = "external"
"""A version for other programs."""
SOURCE: Final = "source"
"""Weights which an operation of the run loads, until no replay of the run needs them."""
AUTO: Final = "auto"
"""What an engine writes by itself, to begin again from."""

PENDING: Final = "pending"
"""A checkpoint that is announced, and no more."""
READY: Final = "ready"

ACTIVE: Final = "active"
"""A run that goes on."""
BROKEN: Final = "broken"
"""One that cannot, for a reason that stands beside it."""
COPY: Final = "copy"
"""One that holds weights of another run and has no operations."""
