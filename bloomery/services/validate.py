"""What can be refused before an engine sees it: the message names the field and says what to change.

The data are those of `types/operations`. Shapes: N tokens of a datum, K soft targets per token.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from bloomery.services.models import Size
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.operations import AdamParams, Datum, ForwardBackward, LoraSpec

MAX_RANK: Final = 128
MAX_SEED: Final = (1 << 63) - 1
MAX_METADATA_CHARS: Final = 65_536
MAX_NAME_CHARS: Final = 128
TARGETS: Final = "target_tokens"


class LossInputs(NamedTuple):
    """The tensors that a loss takes beside its targets, and whether targets may be soft."""

    floats: tuple[str, ...]
    soft_targets: bool


LOSSES: Final[Mapping[str, LossInputs]] = {
    "cross_entropy": LossInputs(("weights",), soft_targets=True),
    "importance_sampling": LossInputs(("logprobs", "advantages"), soft_targets=False),
}
NOT_YET: Final = frozenset({"ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"})


def check_lora(lora: LoraSpec) -> None:
    """A rank that can be trained, on something."""
    if lora.rank == 0:
        raise NotSupported("rank 0 means full parameters, which are not supported yet: choose a rank from 1 to 128", field="rank")
    if not 1 <= lora.rank <= MAX_RANK:
        raise InvalidInput(f"rank is {lora.rank}: it must be from 1 to {MAX_RANK}", field="rank")
    check_seed(lora.seed)
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise InvalidInput(f"alpha is {lora.alpha}: it must be a finite number above 0", field="alpha")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise InvalidInput("nothing would be trained: set one of train_attn, train_mlp, train_unembed", field="train_attn")


def check_seed(seed: int) -> None:
    """A seed that every place it goes to can hold."""
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput(f"`seed` is {seed}: it must be between 0 and {MAX_SEED}", field="seed")


def check_labels(name: str | None, metadata: Mapping[str, str]) -> None:
    """Texts that people put on a run."""
    if name is not None and not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidInput(f"the name has {len(name)} characters: give 1 to {MAX_NAME_CHARS}", field="name")
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_CHARS:
        raise InvalidInput(f"metadata is longer than {MAX_METADATA_CHARS} characters: keep less", field="metadata")


def check_adam(adam: AdamParams) -> None:
    """Numbers that cannot spoil a run."""
    if not (math.isfinite(adam.learning_rate) and adam.learning_rate >= 0):
        raise InvalidInput(f"learning_rate is {adam.learning_rate}: it must be a finite number, at least 0", field="learning_rate")
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(adam, name)) < 1:
            raise InvalidInput(f"{name} is {value}: it must be at least 0 and below 1", field=name)
    if not (math.isfinite(adam.eps) and adam.eps > 0):
        raise InvalidInput(f"eps is {adam.eps}: it must be a finite number above 0", field="eps")
    for name in ("weight_decay", "grad_clip_norm"):
        if not (math.isfinite(value := getattr(adam, name)) and value >= 0):
            raise InvalidInput(f"{name} is {value}: it must be a finite number of at least 0", field=name)


def check_forward_backward(operation: ForwardBackward, size: Size) -> None:
    """A known loss, and data that fit it and the model."""
    if operation.loss in NOT_YET:
        raise NotSupported(f"loss `{operation.loss}` is not supported yet: use one of {', '.join(LOSSES)}", field="loss_fn")
    if operation.loss not in LOSSES:
        raise InvalidInput(f"unknown loss `{operation.loss}`: use one of {', '.join(LOSSES)}", field="loss_fn")
    if operation.loss_config:
        raise InvalidInput(f"loss_fn_config: loss `{operation.loss}` has no option `{min(operation.loss_config)}`", field="loss_fn_config")
    if not operation.data:
        raise InvalidInput("data is empty: send at least one datum", field="data")
    for index, datum in enumerate(operation.data):
        _check_datum(datum, f"data[{index}]", LOSSES[operation.loss], size)


def _check_datum(datum: Datum, where: str, loss: LossInputs, size: Size) -> None:
    shape = datum.tokens.shape
    if len(shape) != 1 or shape[0] == 0 or datum.tokens.dtype == "float32":
        raise InvalidInput(f"{where}: tokens are {datum.tokens.dtype}{list(shape)}, expected integers [N], N at least 1", field=f"{where}.tokens")
    if shape[0] > size.context:
        raise InvalidInput(f"{where} has {shape[0]} tokens, the model's context is {size.context}: shorten it", field=f"{where}.tokens")
    _check_ids(datum.tokens, f"{where}.tokens", size)
    expected = {TARGETS, *loss.floats}
    if odd := expected ^ datum.inputs.keys():
        problem = f"lacks `{min(odd)}`" if min(odd) in expected else f"has `{min(odd)}`, which this loss does not take"
        raise InvalidInput(f"{where} {problem}: its inputs are {', '.join(sorted(expected))}", field=f"{where}.{min(odd)}")
    targets = datum.inputs[TARGETS]
    _check_targets(targets, f"{where}.{TARGETS}", shape[0], loss, size)
    for name in loss.floats:
        _check_floats(datum.inputs[name], f"{where}.{name}", targets.shape)


def _check_targets(targets: Array, where: str, length: int, loss: LossInputs, size: Size) -> None:
    expected = f"[{length}] or [{length}, K]" if loss.soft_targets else f"[{length}]"
    dimensions = len(targets.shape)
    if targets.dtype == "float32" or dimensions not in ((1, 2) if loss.soft_targets else (1,)) or targets.shape[0] != length or 0 in targets.shape:
        raise InvalidInput(f"{where} is {targets.dtype}{list(targets.shape)}, expected integers {expected}", field=where)
    _check_ids(targets, where, size)


def _check_ids(ids: Array, where: str, size: Size) -> None:
    values = ids.numpy()
    if values.min() < 0 or values.max() >= size.vocab_size:
        worst = values.min() if values.min() < 0 else values.max()
        raise InvalidInput(f"{where} holds token id {worst}: ids are from 0 to {size.vocab_size - 1}", field=where)


def _check_floats(values: Array, where: str, shape: tuple[int, ...]) -> None:
    if values.dtype != "float32" or values.shape != shape:
        raise InvalidInput(f"{where} is {values.dtype}{list(values.shape)}, expected float32{list(shape)}", field=where)
    if not np.isfinite(values.numpy()).all():
        raise InvalidInput(f"{where} holds a value that is not finite", field=where)
