"""What tells one family of models from another. `__init__` has the table of them; adding a family is adding a record to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

Raw = Mapping[str, Any]
"""The fields of a `config.json` that have a value, and a family's defaults for the others."""
Reader = Callable[[Raw, int], dict[str, Any]]


class NormNames(NamedTuple):
    """What a directory calls the norms of a layer, in the order in which they apply; the second and fourth only some families have."""

    attention: str
    attention_out: str
    mlp: str
    mlp_out: str


_NORM_NAMES: Final = NormNames("input_layernorm", "", "post_attention_layernorm", "")


def _nothing(raw: Raw) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the config of a family is read, and what its files call their tensors."""

    read: Reader
    """From a config and the dimension of a head to the fields of a `DecoderConfig` beside the sizes, which all families say alike."""
    defaults: Raw = field(default_factory=dict)
    """What its config says where its file says nothing."""
    derive: Callable[[Raw], dict[str, Any]] = _nothing
    """Fields that other families say, from those in which this one says the same."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of a field that the core can compute; without a value, or with null, it is what the first of them is."""
    may_have: frozenset[str] = frozenset()
    """Of `attention_bias` and `per_layer_config`, what is supported here and refused elsewhere."""
    norm_names: NormNames = _NORM_NAMES
    words: Mapping[str, str] = field(default_factory=dict)
    """Its own words for parts of the names of tensors, or for whole names."""
    mtp_prefix: str | None = None
    """Of the tensors of layers that predict further tokens; None where these are numbered behind the others."""
