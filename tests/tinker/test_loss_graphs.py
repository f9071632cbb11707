"""Graphs of custom losses at the door: what is not understood, out of bounds or out of order is refused by name."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.loss_graphs import parse_custom_loss
from bloomery.types.custom_loss import OPERATORS, Call, CustomInput, CustomLoss, Items, Ref, Slice, check_custom_loss
from bloomery.types.errors import BloomeryError, InvalidInput

LOGPROBS = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
WEIGHTS = {"op": "placeholder", "name": "w", "target": "weights"}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def call(target: str, *args: Any, name: str = "x", op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def method(target: str, *args: Any, name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return call(target, *args, name=name, op="call_method", **kwargs)


def output(loss: Any = None, metrics: Any = None) -> dict[str, Any]:
    return call("output", {"tuple": [ref("total") if loss is None else loss, {"dict": metrics or {}}]}, name="output", op="output")


def asked(*nodes: dict[str, Any], inputs: Any = None, end: Any = None, head: Any = None) -> bodies.CreateCustomLoss:
    total = method("sum", ref("x"), name="total")
    graph = {"format": 1, "nodes": [*(head or [LOGPROBS, WEIGHTS]), *nodes, *([total, output()] if end is None else end)]}
    inputs = inputs or [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
    return bodies.CreateCustomLoss.model_validate({"session_id": "s", "custom_loss_seq_id": 0, "name": "mine", "inputs": inputs, "graph": graph})


X = call("operator.mul", ref("logprobs"), ref("w"))


def test_a_graph_becomes_calls_on_numbered_values() -> None:
    nodes = (
        call("getattr", ref("logprobs"), "shape", name="shape"),
        call("operator.getitem", ref("shape"), 0, name="length"),
        call("operator.getitem", ref("w"), {"tuple": [{"slice": [1, ref("length"), None]}]}, name="later"),
        call("torch.nn.functional.softmax", ref("logprobs"), dim=-1, _stacklevel=3, dtype=None, name="soft"),
        method("where", ref("logprobs"), ref("w"), {"float": "-inf"}),
    )
    loss = parse_custom_loss(asked(*nodes, end=[method("sum", ref("x"), name="total"), output(metrics={"custom/x:sum": ref("total")})]))
    assert loss.inputs == (CustomInput(name="logprobs", rank=1), CustomInput(name="weights", rank=1))
    assert [one.operator for one in loss.calls] == ["shape", "getitem", "getitem", "softmax", "where", "sum"]
    assert loss.calls[2].arguments == {"input": Ref(number=1), "index": Items(values=(Slice(start=1, stop=Ref(number=3), step=None),))}
    assert loss.calls[4].arguments == {"input": Ref(number=0), "condition": Ref(number=1), "other": -math.inf}
    assert (loss.loss, loss.metrics) == (7, {"custom/x:sum": 7})


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        (lambda: asked(call("torch.load", "x")), "node `x`: operator `load` is not one"),
        (lambda: asked(call("os.system", "x")), "function `os.system` is not one"),
        (lambda: asked(call("builtins.eval", "x")), "function `builtins.eval` is not one"),
        (lambda: asked(method("add_", ref("w"), 1)), "operator `add_` is not one"),
        (lambda: asked(method("__class__", ref("w"))), "operator `__class__` is not one"),
        (lambda: asked(call("getattr", ref("w"), "__class__")), "only shape, ndim, T are taken"),
        (lambda: asked(call("getattr", ref("w"), "data")), "only shape, ndim, T are taken"),
        (lambda: asked(call("x", op="call_module")), "a node of kind call_module cannot stand here"),
        (lambda: asked(call("x", op="get_attr")), "a node of kind get_attr cannot stand here"),
        (lambda: asked(call("torch.exp", ref("nobody"))), "refers to `nobody`, which is no node"),
        (lambda: asked(call("torch.exp", ref("x"))), "refers to `x`, which does not come before it: a loss has no cycles"),
        (lambda: asked(call("torch.exp", ref("total"))), "refers to `total`, which does not come before it"),
        (lambda: asked(X, X), "two nodes have the same name"),
        (lambda: asked(X, head=[WEIGHTS, LOGPROBS]), "its placeholders must be logprobs, weights"),
        (lambda: asked(X, head=[LOGPROBS]), "its placeholders must be logprobs, weights"),
        (lambda: asked(X, {**LOGPROBS, "name": "again"}), "its placeholders must be logprobs, weights"),
        (lambda: asked(X, end=[]), "its last node must be the output"),
        (lambda: asked(X, end=[output(ref("x")), output(ref("x"))]), "two nodes have the same name"),
        (lambda: asked(X, end=[output(1.0)]), "the pair of a loss and a dict of metrics"),
        (lambda: asked(call("operator.add", 1, 2), end=[output(ref("x"))]), "does not return its loss as a tensor"),
        (lambda: asked(X, end=[output(ref("x"), {"loss:sum": ref("x")})]), "metric `loss:sum` must be named custom/NAME:sum"),
        (lambda: asked(X, end=[output(ref("x"), {"custom/a:sum": 1.0})]), "metrics are tensors"),
        (lambda: asked(X, end=[output(ref("x"), {"\ud800": ref("x")})]), "metric `\\ud800` must be named"),
        (lambda: asked(call("torch.exp", ref("\ud800"))), "refers to `\\ud800`"),
        (lambda: asked(call("operator.mul", ref("w"), "x")), "`other` of `mul` must be a tensor or a number"),
        (lambda: asked(call("operator.mod", "%1000000000d", 1)), "`input` of `mod` must be a tensor or a number"),
        (lambda: asked(call("operator.mul", [1], 1 << 40)), "`input` of `mul` must be a tensor or a number"),
        (lambda: asked(call("operator.mul", ref("w"), 1 << 60)), "`other` of `mul` must be a tensor or a number"),
        (lambda: asked(call("operator.mul", ref("w"))), "`mul` needs `other`"),
        (lambda: asked(call("operator.mul", ref("w"), 1, 2)), "takes at most 2 arguments"),
        (lambda: asked(call("torch.exp", ref("w"), out=ref("w"))), "`exp` takes input here, and not `out`"),
        (lambda: asked(call("torch.exp", ref("w"), input=ref("w"))), "is given `input` twice"),
        (lambda: asked(call("torch.nn.functional.relu", ref("w"), inplace=True)), "`inplace` of `relu` must be left out"),
        (lambda: asked(method("to", ref("w"), {"dtype": "bfloat16"})), "`dtype` of `to` must be one of float32, float64, int64, bool"),
        (lambda: asked(method("to", ref("w"), {"device": "cuda"})), "an argument {'device': 'cuda'} is none"),
        (lambda: asked(call("operator.getitem", ref("w"), ref("logprobs"))), "for masks use `torch.where`"),
        (lambda: asked(call("operator.getitem", ref("w"), [0, 1])), "a list as an index is not taken"),
        (lambda: asked(call("torch.stack", [])), "`tensors` of `stack` must be a list"),
        (lambda: asked(call("torch.stack", [ref("w")] * 65)), "`tensors` of `stack` must be a list of at most 64"),
        (lambda: asked(X, inputs=[{"name": "weights", "rank": 1}, {"name": "logprobs", "rank": 1}]), "placeholders must be weights, logprobs"),
        (lambda: asked(X, inputs=[{"name": "logprobs", "rank": 0}, {"name": "weights", "rank": 1}]), "`logprobs` has rank 0"),
        (lambda: asked(X, inputs=[{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 3}]), "`weights` has rank 3"),
    ],
)
def test_what_makes_no_loss_is_refused_by_name(request_of: Any, says: str) -> None:
    with pytest.raises(BloomeryError) as refused:
        parse_custom_loss(request_of())
    assert says in refused.value.message
    assert refused.value.category == "user"


def test_there_is_a_limit_to_nodes() -> None:
    nodes = [call("torch.exp", ref("logprobs"), name=f"x{index}") for index in range(999)]
    assert len(parse_custom_loss(asked(*nodes[:-1], X)).calls) == 1000
    with pytest.raises(InvalidInput, match="loss `mine` has 1001 nodes, at most 1000 are taken"):
        parse_custom_loss(asked(*nodes, X))
    with pytest.raises(ValueError, match="at most 1017 items"):
        asked(*nodes, *nodes)


@pytest.mark.parametrize(
    "change",
    [
        {"calls": (Call(name="x", operator="exp", arguments={"input": Ref(number=1)}),)},
        {"calls": (Call(name="x", operator="exp", arguments={"input": Ref(number=-1)}),)},
        {"calls": (Call(name="x", operator="eval", arguments={}),)},
        {"loss": 2},
        {"loss": -1},
        {"metrics": {"custom/x:sum": 9}},
        {"metrics": {f"custom/x{number}:sum": 1 for number in range(65)}},
        {"inputs": ()},
    ],
)
def test_the_closed_form_is_checked_too(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "name": "mine",
        "inputs": (CustomInput(name="logprobs", rank=1),),
        "calls": (Call(name="x", operator="sum", arguments={"input": Ref(number=0)}),),
        "loss": 1,
        "metrics": {},
    }
    check_custom_loss(CustomLoss(**good))
    with pytest.raises(BloomeryError):
        check_custom_loss(CustomLoss(**{**good, **change}))


def test_the_page_lists_every_operator() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "losses.md").read_text()
    listed = set(re.findall(r"`([^`\n]+)`", page.partition("## `custom`")[2]))
    assert OPERATORS.keys() - listed == set()
