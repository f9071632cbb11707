"""Identity of a model directory's tokenizer, beside that of its chat template: equal tokens of equal texts."""

import json
from pathlib import Path
from typing import Final

from bloomery.sync.manifest import digest

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def tokenizer_hash(directory: Path) -> str:
    """Of the files that there are, by name; of a directory without any too, as tests have it."""
    digests = {name: digest((directory / name).read_bytes()) for name in TOKENIZER_FILES if (directory / name).is_file()}
    return digest(json.dumps(digests, sort_keys=True).encode())
