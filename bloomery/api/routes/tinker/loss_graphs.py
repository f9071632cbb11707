"""Graphs of torch.fx, as the contract spells them, to custom losses of ours.

The contract names an operator as torch does, and in several ways; here each has one name. Nothing is looked up in torch: what is not in the list of
`types/custom_loss.py` is refused by its name.
"""

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from bloomery.api.routes.tinker import bodies
from bloomery.types.custom_loss import (
    UNSET,
    Argument,
    Atom,
    Call,
    CustomInput,
    CustomLoss,
    Items,
    Operator,
    Ref,
    Rest,
    Slice,
    check_custom_loss,
    find_operator,
)
from bloomery.types.errors import InvalidInput, NotSupported

_PREFIXES: Final = ("torch.nn.functional.", "torch._C._nn.", "torch._C._special.special_", "torch.", "operator.")
_SAME: Final = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "and_": "and",
    "or_": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
    "log_sigmoid": "logsigmoid",
    "clip": "clamp",
    "greater": "gt",
    "less": "lt",
    "concat": "cat",
    "dim": "ndim",
    "T": "t",
}
_ATTRIBUTES: Final = ("shape", "ndim", "T")
_METHOD_ORDER: Final = {"where": ("input", "condition", "other")}
"""Of parameters, where a method has another order than the function."""
_OTHER_NAMES: Final = {"self": "input", "exponent": "other", "axis": "dim"}
_MANY: Final = "sizes"
"""Kind of parameters that methods also take as several arguments: `x.view(2, 3)`."""
_FLOATS: Final = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def parse_custom_loss(asked: bodies.CreateCustomLoss) -> CustomLoss:
    """The loss that a request describes, checked."""
    graph = _Graph(asked)
    inputs = tuple(CustomInput(name=given.name, rank=given.rank) for given in asked.inputs)
    loss = CustomLoss(name=asked.name, inputs=inputs, calls=tuple(graph.calls), loss=graph.loss, metrics=graph.metrics)
    check_custom_loss(loss)
    return loss


class _Graph:
    """Reads the nodes in their order; what a node refers to has been read before it."""

    def __init__(self, asked: bodies.CreateCustomLoss) -> None:
        self.calls: list[Call] = []
        self.metrics: dict[str, int] = {}
        self._name, self._nodes = asked.name, asked.graph.nodes
        self._all = {node.name for node in self._nodes}
        self._numbers: dict[str, int] = {}
        self._check_frame([given.name for given in asked.inputs])
        for node in self._nodes[len(asked.inputs) : -1]:
            self._where = f"loss `{self._name:.64}`, node `{node.name:.64}`"
            if node.op not in ("call_function", "call_method"):
                self._refuse(f"a node of kind {node.op} cannot stand here: a loss calls functions of torch on its inputs")
            self.calls.append(self._call(node))
            self._numbers[node.name] = len(self._numbers)
        self._where = f"loss `{self._name:.64}`, its output"
        self.loss = self._output(self._nodes[-1])

    def _check_frame(self, inputs: Sequence[str]) -> None:
        """Unique names; the inputs come first, the output last."""
        self._where = f"loss `{self._name:.64}`"
        if len(self._all) < len(self._nodes):
            self._refuse("two nodes have the same name")
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        if [node.target for node in placeholders] != inputs or placeholders != self._nodes[: len(inputs)]:
            self._refuse(f"its placeholders must be {', '.join(inputs)}, first and in this order")
        if len(self._nodes) == len(inputs) or self._nodes[-1].op != "output":
            self._refuse("its last node must be the output")
        self._numbers = {node.name: number for number, node in enumerate(placeholders)}

    def _call(self, node: bodies.LossNode) -> Call:
        name, args, order = self._operator(node)
        operator = find_operator(name, self._where)
        if name == "getitem" and isinstance(args[-1], list):
            self._refuse("a list as an index is not taken: use slices, or `torch.gather`")
        names = list(order or (parameter.name for parameter in operator.parameters))
        arguments = dict(zip(names, (self._argument(arg) for arg in args[: len(names)]), strict=False))
        last = operator.named(names[-1])
        if last is not None and last.kind == _MANY and (len(args) > len(names) or (len(args) == len(names) and isinstance(args[-1], int))):
            arguments[names[-1]] = Items(values=tuple(self._atom(arg) for arg in args[len(names) - 1 :]))
        elif len(args) > len(names):
            self._refuse(f"`{name}` takes at most {len(names)} arguments here, not {len(args)}")
        for key, arg in node.kwargs.items():
            spelled = key if operator.named(key) else _OTHER_NAMES.get(key, key)
            if spelled in arguments:
                self._refuse(f"`{name}` is given `{spelled}` twice")
            arguments[spelled] = self._argument(arg)
        return Call(name=node.name, operator=name, arguments=_set(arguments, operator))

    def _operator(self, node: bodies.LossNode) -> tuple[str, list[Any], Sequence[str] | None]:
        """Its one name, its arguments, and their order where that is not the usual one."""
        if node.target == "getattr":
            if len(node.args) != 2 or node.args[1] not in _ATTRIBUTES:
                self._refuse(f"of a tensor's attributes only {', '.join(_ATTRIBUTES)} are taken")
            return _SAME.get(node.args[1], node.args[1]), node.args[:1], None
        if node.op == "call_method":
            name = _SAME.get(node.target, node.target)
            if name == "size" and len(node.args) + len(node.kwargs) == 1:
                return "shape", node.args, None
            return name, node.args, _METHOD_ORDER.get(name)
        if node.target.startswith("math."):
            return node.target, node.args, None
        prefix = next((prefix for prefix in _PREFIXES if node.target.startswith(prefix)), None)
        if prefix is None:
            raise NotSupported(f"{self._where}: function `{node.target:.100}` is not one that custom losses have here", field="graph")
        name = node.target.removeprefix(prefix)
        return _SAME.get(name, name), node.args, None

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, dict) and value.keys() == {"tuple"} and isinstance(value["tuple"], list):
            value = value["tuple"]
        if isinstance(value, list):
            return Items(values=tuple(self._atom(item) for item in value))
        return self._atom(value)

    def _atom(self, value: Any) -> Atom:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case {"ref": str(name), **rest} if not rest:
                return Ref(number=self._number(name))
            case {"float": str(text), **rest} if not rest and text in _FLOATS:
                return _FLOATS[text]
            case {"dtype": str(name), **rest} if not rest:
                return name
            case {"ellipsis": True, **rest} if not rest:
                return Rest()
            case {"slice": [start, stop, step], **rest} if not rest:
                return Slice(start=self._end(start), stop=self._end(stop), step=self._end(step))
        self._refuse(f"an argument {value!s:.64} is none that custom losses have here")

    def _end(self, value: Any) -> Ref | int | None:
        found = self._atom(value)
        if not isinstance(found, Ref | int | None):
            self._refuse("a slice begins and ends with whole numbers")
        return found

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            why = "does not come before it: a loss has no cycles" if name in self._all else "is no node of the loss"
            self._refuse(f"it refers to `{name:.64}`, which {why}")
        return self._numbers[name]

    def _output(self, node: bodies.LossNode) -> int:
        match node.args:
            case [{"tuple": [{"ref": str(loss)}, {"dict": dict(metrics)}]}] if not node.kwargs:
                if odd := [name for name in metrics if not name.isascii()]:
                    self._refuse(f"metric `{odd[0]:.100}` must be named custom/NAME:sum or custom/NAME:mean, in lowercase")
                self.metrics = {name: self._reference(value) for name, value in metrics.items()}
                return self._number(loss)
        self._refuse("it must be the pair of a loss and a dict of metrics")

    def _reference(self, value: Any) -> int:
        found = self._atom(value)
        if not isinstance(found, Ref):
            self._refuse("metrics are tensors")
        return found.number

    def _refuse(self, what: str) -> NoReturn:
        # What stands in an argument may hold halves of characters, which no answer can carry.
        raise InvalidInput(f"{self._where}: {what}".encode(errors="backslashreplace").decode(), field="graph")


def _set(arguments: dict[str, Argument], operator: Operator) -> dict[str, Argument]:
    """Without those that are spelled out and say nothing."""
    unset = {parameter.name for parameter in operator.parameters if parameter.kind == UNSET}
    return {name: value for name, value in arguments.items() if not (name in unset and (value is None or value is False))}
