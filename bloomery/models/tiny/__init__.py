"""`bloomery-tiny`, the base model that ships with Bloomery: `PATH` is its Hugging Face directory, `MODEL_CARD.md` says what it is.

`pretrain` made it, from the text that `corpus` reads and `tasks` generates, with the tokenizer of `tokenizer`. Importing this loads none of them.
"""

from pathlib import Path

PATH = Path(__file__).parent / "weights"
