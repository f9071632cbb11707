"""One folder per contract; each exposes `router`."""

import re
from typing import Final

MAX_BODY_BYTES: Final = 256 << 20
"""Of any request; a contract may take less."""
CLIENT_GONE: Final = 499
"""The status of an answer that nobody reads; it is for logs."""
VERSION_HEADER: Final = "x-bloomery-version"
"""Which weights answered."""
LOGPROBS_HEADER: Final = "x-bloomery-logprobs"
"""Whose log-probabilities sampled tokens have, as a `LogprobsMode`, where the answer itself has no place for it."""
FORMS: Final = re.compile(r"(/oai/api)?/v1/(files|uploads/[^/]+/parts)")
"""Paths of OpenAI's contract, whose other bodies are short, where what is posted is a form with a file."""
