"""What the operators of custom losses compute, on tensors and on numbers that stay small; `custom` calls them in the order of a graph."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from bloomery.types.custom_loss import MAX_WHOLE

Value = Tensor | float | int | torch.Size


def _arithmetic(compute: Callable[[Any, Any], Any], of_numbers: Callable[[Any, Any], Any] | None = None) -> Callable[..., Value]:
    """An operator on tensors and numbers; numbers alone stay so small that no chain of them takes time or memory."""

    def kernel(input: Value, other: Value) -> Value:
        if isinstance(input, Tensor) or isinstance(other, Tensor):
            found: Value = compute(input, other)
            return found
        return _bounded((of_numbers or compute)(input, other))

    return kernel


def _bounded(number: Any) -> float | int:
    if isinstance(number, int) and abs(number) > MAX_WHOLE:
        raise OverflowError(f"a whole number above {MAX_WHOLE}")
    if not isinstance(number, int | float):
        raise TypeError(f"it gives {type(number).__name__}")
    return number


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def kernel(input: Value, other: Value) -> Tensor:
        if not (isinstance(input, Tensor) or isinstance(other, Tensor)):
            raise TypeError("two numbers are not compared: one side must be a tensor")
        found: Tensor = compare(input, other)
        return found

    return kernel


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda input: input.to(dtype)


def _cast(input: Tensor, dtype: str) -> Tensor:
    return input.to(_DTYPES[dtype])


def _typed(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the name of a dtype for it."""

    def kernel(input: Tensor, dtype: str | None = None, _stacklevel: int = 0, **options: Any) -> Tensor:
        return compute(input if dtype is None else input.to(_DTYPES[dtype]), **options)

    return kernel


def _min_max(all_of: Callable[[Tensor], Tensor], of_two: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda input, other=None: all_of(input) if other is None else of_two(input, other)


def _expanded(input: Tensor, size: Sequence[int]) -> Tensor:
    new = len(size) - input.dim()
    if any(side < -1 or (side == -1 and index < new) for index, side in enumerate(size)):
        raise ValueError(f"sizes {tuple(size)}: a size is 0 or more, or -1 for a dimension that is there")
    return input.expand(size)


def _item(input: Any, index: Any) -> Any:
    return input[index]


def _reduced(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the parameters that are only taken as unset."""
    unset = ("size_average", "reduce", "inplace", "weight", "pos_weight")
    return lambda input, **options: compute(
        input, **{name: value for name, value in options.items() if name not in unset or isinstance(value, Tensor)}
    )


_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_TORCH: Final = (
    "exp expm1 log log1p log2 sqrt rsqrt square reciprocal sign sigmoid tanh erf sin cos isnan isinf isfinite floor ceil detach clone logical_not"
    " zeros_like ones_like t count_nonzero maximum minimum logical_and logical_or logical_xor logaddexp clamp clamp_min clamp_max masked_fill"
    " full_like amax amin logsumexp var std any all reshape permute flatten squeeze unsqueeze transpose narrow gather tril triu stack cat"
)
_FUNCTIONAL: Final = "logsigmoid softplus relu silu elu leaky_relu mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits"
KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: _reduced(getattr(functional, name)) for name in _FUNCTIONAL.split()},
    **{name: _typed(getattr(torch, name)) for name in ("sum", "mean", "cumsum", "softmax", "log_softmax")},
    **{name: _arithmetic(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv", "mod")},
    **{name: _compared(getattr(operator, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne", "xor")},
    "div": _arithmetic(operator.truediv),
    "pow": _arithmetic(operator.pow, math.pow),
    "and": _compared(operator.and_),
    "or": _compared(operator.or_),
    "invert": torch.bitwise_not,
    "neg": lambda input: operator.neg(input),
    "abs": lambda input: abs(input),
    "dot": lambda input, other: torch.dot(input, other),
    "where": lambda condition, input, other: torch.where(condition, input, other),
    "expand_as": lambda input, other: input.expand_as(other),
    "type_as": lambda input, other: input.type_as(other),
    "max": _min_max(torch.max, torch.maximum),
    "min": _min_max(torch.min, torch.minimum),
    "math.sqrt": lambda input: math.sqrt(input),
    "math.log": lambda input: math.log(input),
    "math.exp": lambda input: math.exp(input),
    "contiguous": lambda input: input.contiguous(),
    "bool": _to(torch.bool),
    "float": _to(torch.float32),
    "double": _to(torch.float64),
    "long": _to(torch.int64),
    "to": _cast,
    "view": torch.reshape,
    "expand": lambda input, size: _expanded(input, size),
    "shape": lambda input: input.shape,
    "size": lambda input, dim: input.shape[dim],
    "ndim": lambda input: input.ndim,
    "numel": lambda input: input.numel(),
    "getitem": _item,
}
"""One for each operator of `types/custom_loss.py`, whose arguments the door has checked."""
