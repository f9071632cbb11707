import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.grade.formula import FUNCTIONS, MAX_CHARS, MAX_DEPTH, NoNumber, parse_formula
from bloomery.types.errors import InvalidInput

SCORES = {"a": 0.5, "b": 0.25, "name_1": 3.0}


def value(text: str) -> float:
    return parse_formula(text, SCORES).value(SCORES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", 0.5),
        ("0.5 * a + 0.5 * b", 0.375),
        ("(a + b) / 2", 0.375),
        ("a - b - b", 0.0),
        ("8 / 4 / 2", 1.0),
        ("2 + 3 * 4", 14.0),
        ("2 ^ 3 ^ 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("(-2) ^ 2", 4.0),
        ("2 ^ -1", 0.5),
        ("--a", 0.5),
        ("+a - -b", 0.75),
        ("2 * -a", -1.0),
        ("min(a, b, 3)", 0.25),
        ("max(a, name_1)", 3.0),
        ("abs(-a)", 0.5),
        ("floor(-0.5)", -1.0),
        ("ceil(a)", 1.0),
        ("exp(0)", 1.0),
        ("sqrt(9)", 3.0),
        ("log(exp(1))", 1.0),
        ("1e2 + .5 + 2.", 102.5),
        ("\n a\t+ b ", 0.75),
    ],
)
def test_formulas_mean_what_arithmetic_does(text: str, expected: float) -> None:
    assert value(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["1 / 0", "1 / (a - 0.5)", "sqrt(-1)", "log(0)", "(-8) ^ 0.5", "0 ^ -1", "exp(1000)", "10 ^ 400", "1e308 * 10", "9 ^ 9 ^ 9 ^ 9", "1e999"],
)
def test_what_comes_to_no_finite_number_is_said_to(text: str) -> None:
    with pytest.raises(NoNumber, match=r"number|is inf"):
        value(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ends where"),
        ("a +", "ends where"),
        ("a b", "goes on with `b`"),
        ("(a", "has no `\\)`"),
        ("a)", "goes on with"),
        ("min()", "where a number"),
        ("abs(a, b)", "takes one"),
        ("c + 1", "names `c`, and the graders are a, b, name_1"),
        ("pow(a, 2)", "calls `pow`"),
        ("a ** 2", r"has `\*`"),
        ("a % 2", "has `%`"),
        ("a.real", "has `.`"),
        ("__import__('os')", "calls `__import__`|has `'`"),
        ("a if b else 0", "goes on with"),
        ("[a]", r"has `\["),
        ("a; b", "has `;`"),
        ("²", "has `²`"),
        ("(" * 200 + "a" + ")" * 200, "within each other"),
        ("-" * 200 + "a", "within each other"),
        ("2^" * 200 + "a", "within each other"),
        ("a+" * MAX_CHARS, "characters"),
    ],
)
def test_what_is_no_formula_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        parse_formula(text, SCORES)
    assert refused.value.field == "calculate_output"


def test_depth_is_allowed_up_to_its_bound() -> None:
    assert value("(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH) == 0.5


def test_only_the_names_that_are_looked_up_are_needed() -> None:
    formula = parse_formula("max(a, 0)", SCORES)
    assert formula.names == {"a"}
    assert formula.value({"a": 0.25}) == 0.25


def test_a_grader_may_have_the_name_of_a_function() -> None:
    assert parse_formula("max(max, 1)", ["max"]).value({"max": 2.0}) == 2.0


@pytest.mark.slow
@given(st.text(max_size=60) | st.text(alphabet="ab0.e19+-*/^(), minxlogqrt", max_size=60))
def test_any_text_is_a_number_or_a_typed_refusal(text: str) -> None:
    try:
        found = value(text)
    except (InvalidInput, NoNumber):
        return
    assert math.isfinite(found)


_TREES = st.recursive(
    st.sampled_from(["a", "b", "2", "0.5"]),
    lambda below: st.tuples(st.sampled_from("+-*"), below, below) | st.tuples(st.sampled_from(["min", "max"]), below, below),
    max_leaves=12,
)
_PLAIN = {"+": operator.add, "-": operator.sub, "*": operator.mul, "min": min, "max": max}


def spelled(tree: object) -> str:
    if isinstance(tree, str):
        return tree
    assert isinstance(tree, tuple)
    sign, left, right = tree
    return f"{sign}({spelled(left)}, {spelled(right)})" if sign in FUNCTIONS else f"({spelled(left)} {sign} {spelled(right)})"


def computed(tree: object) -> float:
    if isinstance(tree, str):
        return SCORES[tree] if tree in SCORES else float(tree)
    assert isinstance(tree, tuple)
    sign, left, right = tree
    return float(_PLAIN[sign](computed(left), computed(right)))


@given(_TREES)
def test_the_reader_agrees_with_a_tree_that_is_computed_directly(tree: object) -> None:
    assert value(spelled(tree)) == computed(tree)
