"""A loss that a caller defined: operators of a closed list over named inputs, as data.

A loss is of one datum; an operation adds up those of its data. Values are numbered: the inputs first, then what each call gives. A call refers to
earlier values alone, so there are no cycles. `check_custom_loss` finds everything wrong that shapes do not tell; the engine evaluates what passed
(`train/custom.py`). Shapes: T predictions, K soft targets per prediction.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.wire import Wire

LOGPROBS: Final = "logprobs"
"""The first input: log-probabilities of a datum's targets, in their shape."""
MAX_CALLS: Final = 1000
MAX_INPUTS: Final = 16
MAX_METRICS: Final = 64
MAX_ITEMS: Final = 64
MAX_WHOLE: Final = 1 << 53
"""Of whole numbers: float64 holds all up to it."""
DTYPES: Final = ("float32", "float64", "int64", "bool")
REDUCTIONS: Final = ("none", "mean", "sum")
_INPUT_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


class Ref(Wire, frozen=True, tag="ref"):
    """An earlier value."""

    number: int


class Slice(Wire, frozen=True, tag="slice"):
    """`start:stop:step` of an index."""

    start: Ref | int | None
    stop: Ref | int | None
    step: Ref | int | None


class Rest(Wire, frozen=True, tag="rest"):
    """`...` of an index."""


Atom = Ref | Slice | Rest | str | float | int | bool | None


class Items(Wire, frozen=True, tag="items"):
    """Several: dimensions, sizes, tensors, or the parts of an index."""

    values: tuple[Atom, ...]


Argument = Items | Atom


class Call(Wire, frozen=True):
    """One application of an operator; `name` is the caller's own name for it."""

    name: str
    operator: str
    arguments: dict[str, Argument]


class CustomInput(Wire, frozen=True):
    """`logprobs`, or an input of every datum; rank 0 is a scalar, 1 is [T], 2 is [T, K]."""

    name: str
    rank: int


class CustomLoss(Wire, frozen=True):
    """`loss` is the value that is the loss, a scalar; `metrics` say which scalars are reported, under names that end with how they add up."""

    name: str
    inputs: tuple[CustomInput, ...]
    calls: tuple[Call, ...]
    loss: int
    metrics: dict[str, int]


Kind = Literal["tensor", "number", "sizes"]
"""What a value is: the sizes of a tensor, and numbers made of them, are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """What an operator takes under a name."""

    name: str
    kind: str
    required: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Parameters in torch's order. `gives` None: a number where it gets numbers alone, else a tensor."""

    parameters: tuple[Parameter, ...]
    gives: Kind | None = "tensor"

    def named(self, name: str) -> Parameter | None:
        """The parameter of this name."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


UNSET: Final = "unset"
"""Kind of parameters that torch has and that are only taken as None or False."""


def _operators(signature: str, names: str, gives: Kind | None = "tensor") -> dict[str, Operator]:
    """One for each of the names; `name:kind` are parameters, those with `?` may be left out."""
    parameters = []
    for part in signature.split():
        name, _, kind = part.partition(":")
        parameters.append(Parameter(name=name, kind=kind.removesuffix("?"), required=not kind.endswith("?")))
    return {operator: Operator(parameters=tuple(parameters), gives=gives) for operator in names.split()}


_POINTWISE: Final = (
    "exp expm1 log log1p log2 sqrt rsqrt square reciprocal sign sigmoid tanh erf sin cos logsigmoid isnan isinf isfinite floor ceil"
    " detach clone contiguous bool float double long logical_not invert zeros_like ones_like t count_nonzero"
)
_REDUCED: Final = "size_average:unset? reduce:unset? reduction:word?"
OPERATORS: Final[dict[str, Operator]] = {
    **_operators("input:tensor", _POINTWISE),
    **_operators("input:value", "neg abs", None),
    **_operators("input:value other:value", "add sub mul div pow floordiv mod", None),
    **_operators("input:value other:value", "gt ge lt le eq ne and or xor"),
    **_operators("input:tensor other:tensor", "maximum minimum logical_and logical_or logical_xor logaddexp dot expand_as type_as"),
    **_operators("input:number", "math.sqrt math.log math.exp", "number"),
    **_operators("input:tensor inplace:unset?", "relu silu"),
    **_operators("input:tensor alpha:number? inplace:unset?", "elu"),
    **_operators("input:tensor negative_slope:number? inplace:unset?", "leaky_relu"),
    **_operators("input:tensor beta:number? threshold:number?", "softplus"),
    **_operators("input:tensor dim:int _stacklevel:int? dtype:dtype?", "softmax log_softmax"),
    **_operators("condition:tensor input:value other:value", "where"),
    **_operators("input:tensor min:value? max:value?", "clamp"),
    **_operators("input:tensor min:value", "clamp_min"),
    **_operators("input:tensor max:value", "clamp_max"),
    **_operators("input:tensor mask:tensor value:value", "masked_fill"),
    **_operators("input:tensor fill_value:number", "full_like"),
    **_operators("input:tensor dim:dims? keepdim:flag? dtype:dtype?", "sum mean"),
    **_operators("input:tensor dim:dims? keepdim:flag?", "amax amin"),
    **_operators("input:tensor dim:dims keepdim:flag?", "logsumexp"),
    **_operators("input:tensor dim:dims? unbiased:flag? keepdim:flag?", "var std"),
    **_operators("input:tensor dim:int? keepdim:flag?", "any all"),
    **_operators("input:tensor other:tensor?", "max min"),
    **_operators("input:tensor dim:int dtype:dtype?", "cumsum"),
    **_operators("input:tensor shape:sizes", "reshape view"),
    **_operators("input:tensor size:sizes", "expand"),
    **_operators("input:tensor dims:sizes", "permute"),
    **_operators("input:tensor start_dim:int? end_dim:int?", "flatten"),
    **_operators("input:tensor dim:int?", "squeeze"),
    **_operators("input:tensor dim:int", "unsqueeze"),
    **_operators("input:tensor dim0:int dim1:int", "transpose"),
    **_operators("input:tensor dim:int start:int length:int", "narrow"),
    **_operators("input:tensor dim:int index:tensor", "gather"),
    **_operators("input:tensor diagonal:int?", "tril triu"),
    **_operators("tensors:tensors dim:int?", "stack cat"),
    **_operators("input:tensor dtype:dtype", "to"),
    **_operators("input:tensor", "shape", "sizes"),
    **_operators("input:tensor dim:int", "size", "number"),
    **_operators("input:tensor", "ndim numel", "number"),
    **_operators("input:any index:index", "getitem", None),
    **_operators(f"input:tensor target:tensor {_REDUCED} weight:unset?", "mse_loss"),
    **_operators(f"input:tensor target:tensor {_REDUCED}", "l1_loss"),
    **_operators(f"input:tensor target:tensor {_REDUCED} beta:number?", "smooth_l1_loss"),
    **_operators("input:tensor target:tensor reduction:word? delta:number? weight:unset?", "huber_loss"),
    **_operators(f"input:tensor target:tensor weight:tensor? {_REDUCED} pos_weight:unset?", "binary_cross_entropy_with_logits"),
}
"""All there are."""


def find_operator(name: str, where: str) -> Operator:
    """The operator of this name."""
    if name not in OPERATORS:
        raise NotSupported(f"{where}: operator `{name}` is not one that custom losses have here (docs/losses.md lists them)", field="graph")
    return OPERATORS[name]


def check_custom_loss(loss: CustomLoss) -> None:
    """Refuse by name what no shapes could make right."""
    _check_inputs(loss)
    if len(loss.calls) > MAX_CALLS:
        _refuse(f"loss `{loss.name:.64}` has {len(loss.calls)} nodes, at most {MAX_CALLS} are taken: simplify it")
    kinds: list[Kind] = ["tensor"] * len(loss.inputs)
    for call in loss.calls:
        kinds.append(_Check(kinds, f"loss `{loss.name:.64}`, node `{call.name:.64}`").call(call))
    _check_output(loss, kinds)


def _check_inputs(loss: CustomLoss) -> None:
    names = [given.name for given in loss.inputs]
    if names[:1] != [LOGPROBS] or len(names) > MAX_INPUTS or len(set(names)) < len(names):
        _refuse(f"a custom loss takes `{LOGPROBS}` first and at most {MAX_INPUTS} different inputs, not {names[: MAX_INPUTS + 1]}", "inputs")
    for given in loss.inputs:
        if not _INPUT_NAME.fullmatch(given.name):
            _refuse(f"input `{given.name:.64}`: give it a lowercase name of letters, digits and underscores", "inputs")
        if given.rank not in ((1, 2) if given.name == LOGPROBS else (0, 1, 2)):
            _refuse(f"input `{given.name}` has rank {given.rank}: it must be 1 or 2, or 0 for a scalar other than `{LOGPROBS}`", "inputs")


def _check_output(loss: CustomLoss, kinds: Sequence[Kind]) -> None:
    if len(loss.metrics) > MAX_METRICS:
        _refuse(f"loss `{loss.name:.64}` has {len(loss.metrics)} metrics, at most {MAX_METRICS} are taken: return fewer")
    for name in loss.metrics:
        if not _METRIC_NAME.fullmatch(name):
            _refuse(f"metric `{name:.100}` must be named custom/NAME:sum or custom/NAME:mean, in lowercase")
    for what, number in {"its loss": loss.loss, **{f"metric `{name}`": number for name, number in loss.metrics.items()}}.items():
        if not 0 <= number < len(kinds) or kinds[number] != "tensor":
            _refuse(f"loss `{loss.name:.64}` does not return {what} as a tensor: return a scalar tensor")


class _Check:
    """Checks one call against the values before it."""

    def __init__(self, kinds: Sequence[Kind], where: str) -> None:
        self._kinds, self._where = kinds, where

    def call(self, call: Call) -> Kind:
        """What it gives."""
        operator = find_operator(call.operator, self._where)
        for name in call.arguments:
            if operator.named(name) is None:
                taken = ", ".join(parameter.name for parameter in operator.parameters if parameter.kind != UNSET)
                self._refuse(f"`{call.operator}` takes {taken} here, and not `{name:.64}`")
        for parameter in operator.parameters:
            if parameter.name in call.arguments:
                if not self._is(call.arguments[parameter.name], parameter.kind) and (
                    parameter.required or call.arguments[parameter.name] is not None
                ):
                    self._refuse(f"`{parameter.name}` of `{call.operator}` must be {_MUST_BE[parameter.kind]}")
            elif parameter.required:
                self._refuse(f"`{call.operator}` needs `{parameter.name}`")
        return self._given_by(call, operator)

    def _given_by(self, call: Call, operator: Operator) -> Kind:
        if operator.gives is not None:
            return operator.gives
        if call.operator != "getitem":
            return "tensor" if any(self._kind(value) == "tensor" for value in call.arguments.values()) else "number"
        kind, index = self._kind(call.arguments["input"]), call.arguments["index"]
        if kind == "sizes":
            if isinstance(index, Slice):
                return "sizes"
            if self._kind(index) != "number":
                self._refuse("sizes are indexed by one number or a slice")
            return "number"
        if kind != "tensor":
            self._refuse("a number cannot be indexed")
        return "tensor"

    def _kind(self, value: Argument) -> Kind | None:
        if isinstance(value, Ref):
            if not 0 <= value.number < len(self._kinds):
                self._refuse("it refers to a value that does not come before it")
            return self._kinds[value.number]
        if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= MAX_WHOLE):
            return "number"
        return None

    def _is(self, value: Argument, kind: str) -> bool:
        match kind:
            case "any":
                return self._kind(value) is not None
            case "tensor" | "number":
                return self._kind(value) == kind
            case "value":
                return self._kind(value) in ("tensor", "number")
            case "int":
                return self._whole(value)
            case "dims":
                return _constant(value) or (isinstance(value, Items) and len(value.values) <= MAX_ITEMS and all(map(_constant, value.values)))
            case "sizes":
                return self._kind(value) == "sizes" or self._all(value, self._whole)
            case "tensors":
                return self._all(value, lambda item: self._kind(item) == "tensor") and isinstance(value, Items) and bool(value.values)
            case "index":
                return self._part_of_index(value) or self._all(value, self._part_of_index)
            case "flag":
                return isinstance(value, bool)
            case "dtype":
                return value in DTYPES
            case "word":
                return value in REDUCTIONS
            case _:
                return value is None or value is False

    def _all(self, value: Argument, holds: Callable[[Argument], bool]) -> bool:
        return isinstance(value, Items) and len(value.values) <= MAX_ITEMS and all(holds(item) for item in value.values)

    def _whole(self, value: Argument) -> bool:
        return _constant(value) or (isinstance(value, Ref) and self._kind(value) == "number")

    def _part_of_index(self, value: Argument) -> bool:
        if isinstance(value, Slice):
            return all(part is None or self._whole(part) for part in (value.start, value.stop, value.step))
        return value is None or isinstance(value, Rest) or self._whole(value)

    def _refuse(self, what: str) -> NoReturn:
        _refuse(f"{self._where}: {what}")


_MUST_BE: Final = {
    "any": "a tensor or the sizes of one",
    "tensor": "a tensor",
    "number": "a number, or made of sizes",
    "value": "a tensor or a number",
    "int": "a whole number",
    "dims": "a dimension or several",
    "sizes": "sizes, whole numbers each",
    "tensors": f"a list of at most {MAX_ITEMS} tensors",
    "index": "numbers, slices, None and `...`; for masks use `torch.where`",
    "flag": "True or False",
    "dtype": f"one of {', '.join(DTYPES)}",
    "word": f"one of {', '.join(REDUCTIONS)}",
    UNSET: "left out",
}


def _constant(value: Argument) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_WHOLE


def _refuse(what: str, field: str = "graph") -> NoReturn:
    raise InvalidInput(what, field=field)
