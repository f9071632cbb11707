"""Whose signatures count is said by whoever reads a chain: whoever left it out would check none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import bloomery

ROOT = Path(bloomery.__file__).parent
DOORS = {"Publisher.open", "Receiver.open"}
"""Of the library, whose users may have no keys."""
WHOM_TO_TRUST = {"Sequence[Verifier]", "Keys"}


def test_only_the_doors_of_the_library_trust_everybody_unless_told() -> None:
    functions = [(each, path) for path, tree in _modules() for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    assert {path.stem for each, path in functions if _checks_none_unless_told(each)} == {door.split(".")[0].lower() for door in DOORS}


def test_the_house_says_at_these_doors_whom_it_trusts() -> None:
    calls = [each for _, tree in _modules() for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) in DOORS]
    assert calls
    assert [ast.unparse(call) for call in calls if "trusted" not in {keyword.arg for keyword in call.keywords}] == []


def _modules() -> Iterator[tuple[Path, ast.Module]]:
    return ((path, ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py")))


def _checks_none_unless_told(function: ast.FunctionDef) -> bool:
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    with_default = positional[len(positional) - len(arguments.defaults) :]
    with_default += [argument for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is not None]
    return any(argument.annotation is not None and ast.unparse(argument.annotation) in WHOM_TO_TRUST for argument in with_default)
