"""Fields of a `config.json` that several families have: sizes, windows, the rotary embedding."""

from collections.abc import Sequence
from typing import Final

from bloomery.models.config import RopeConfig
from bloomery.models.families.family import Raw
from bloomery.types.errors import InvalidInput, NotSupported

_LARGEST_SIZE: Final = 1 << 24
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")


def check_sizes(raw: Raw, *names: str) -> None:
    """Refuse what is no positive whole number, or too large for a size."""
    for name in names:
        value = raw.get(name)
        if not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
            raise InvalidInput(f"{name} is {value!r}: a whole number from 1 to {_LARGEST_SIZE} is expected", field=name)


def windows(raw: Raw, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Per layer, by its kind, how many latest keys a query sees."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def further_layers(raw: Raw) -> int:
    """Layers that predict further tokens."""
    return int(raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0)


def rope(raw: Raw, *, kinds: tuple[str, ...] = _ROPE_KINDS, rotary_dim: int | None = None, interleaved: bool = False) -> RopeConfig:
    """The rotary embedding, of one of the `kinds`."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta", 10_000.0)
    if kind not in kinds:
        raise NotSupported(f"rope type `{kind}` is not supported: one of {', '.join(kinds)}", field="rope_parameters")
    if rotary_dim is None and _rotary_factor(raw) != 1.0:
        raise NotSupported("partial rotary embeddings are not supported", field="rope_parameters")
    if kind != "proportional":
        scaling.pop("partial_rotary_factor", None)
    scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 2048))
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        scaling=scaling,
        query_beta=float(scaling.get("llama_4_scaling_beta") or 0.0),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
    )


def rotary_dim(raw: Raw, head_dim: int) -> int:
    """How many dimensions of a head turn."""
    dim = int(head_dim * _rotary_factor(raw))
    if not 2 <= dim <= head_dim or dim % 2:
        says = f"partial_rotary_factor {_rotary_factor(raw)} turns {dim} of {head_dim} dimensions"
        raise InvalidInput(f"{says}: an even number of them is expected", field="rope_parameters")
    return dim


def _rotary_factor(raw: Raw) -> float:
    """Which part of a head turns: said beside the rope's other numbers, or, in older files, of the model."""
    parameters: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return float(parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))
