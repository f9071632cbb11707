"""What a run may be: the message names the field and says what to change. Operations and samples are checked by `types/checks.py`."""

from collections.abc import Mapping
from typing import Final

from bloomery.types.checks import check_seed
from bloomery.types.errors import InvalidInput
from bloomery.types.operations import LoraSpec

MAX_RANK: Final = 128
MAX_ALPHA: Final = 65_536.0
DEFAULT_ALPHA: Final = LoraSpec(rank=0, seed=0).alpha
MAX_METADATA_CHARS: Final = 65_536
MAX_NAME_CHARS: Final = 128


def check_lora(lora: LoraSpec) -> None:
    """A rank that can be trained (0: all parameters), on something."""
    if not 0 <= lora.rank <= MAX_RANK:
        raise InvalidInput(f"rank is {lora.rank}: it must be from 1 to {MAX_RANK}, or 0 to train all parameters", field="rank")
    check_seed(lora.seed)
    if not 0 < lora.alpha <= MAX_ALPHA:
        raise InvalidInput(f"alpha is {lora.alpha}: it must be above 0 and at most {MAX_ALPHA:g}", field="alpha")
    if lora.rank == 0 and lora.alpha != DEFAULT_ALPHA:
        raise InvalidInput(f"alpha is {lora.alpha}: it scales an adapter, and a run of all parameters (rank 0) has none; leave it out", field="alpha")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise InvalidInput("nothing would be trained: set one of train_attn, train_mlp, train_unembed", field="train_attn")


def check_labels(name: str | None, metadata: Mapping[str, str]) -> None:
    """Texts that people put on a run."""
    if name is not None and not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidInput(f"the name has {len(name)} characters: give 1 to {MAX_NAME_CHARS}", field="name")
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_CHARS:
        raise InvalidInput(f"metadata is longer than {MAX_METADATA_CHARS} characters: keep less", field="metadata")
