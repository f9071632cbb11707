"""What factors are called in a published adapter, and in PEFT: the name that `transformers` has for the projection, and which of the two it is."""

import re
from functools import lru_cache
from typing import Final

PUBLISHED_PREFIX: Final = "base_model.model.model."
_OWN_EXPERTS: Final = re.compile(r"\.(mlp|mixer)\.")
_PUBLISHED_EXPERTS: Final = re.compile(r"\.(mlp|mixer)\.experts\.")
_REMEMBERED: Final = 1 << 14
"""Names, of which every version of an adapter has the same hundreds."""


@lru_cache(_REMEMBERED)
def published_name(factor: str, *, stacked: bool) -> str:
    """What a published adapter, and PEFT, call a factor of ours; `stacked` says that it is one of experts."""
    own = _OWN_EXPERTS.sub(r".\1.experts.", factor) if stacked else factor
    return f"{PUBLISHED_PREFIX}{own}.weight"


@lru_cache(_REMEMBERED)
def published_factor(name: str) -> str:
    """Our name of a factor (`layers.0.self_attn.q_proj.lora_A`) from that in a published adapter, which PEFT uses too."""
    return _PUBLISHED_EXPERTS.sub(r".\1.", name.removeprefix(PUBLISHED_PREFIX)).removesuffix(".weight")
