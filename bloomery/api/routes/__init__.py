"""One folder per contract; each exposes `router`."""

from typing import Final

MAX_BODY_BYTES: Final = 256 << 20
"""Of any request; a contract may take less."""
VERSION_HEADER: Final = "x-bloomery-version"
"""Which weights answered."""
LOGPROBS_HEADER: Final = "x-bloomery-logprobs"
"""Whose log-probabilities sampled tokens have, as a `LogprobsMode`, where the answer itself has no place for it."""
