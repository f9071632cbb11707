"""YAML that people write is read whole, or refused."""

import math
from typing import Any

import pytest

from bloomery.config.written import read_yaml


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("a: 1\nb: [1, {a: 2}]", {"a": 1, "b": [1, {"a": 2}]}),
        ("base: &base {rank: 4, seed: 1}\njob: {<<: *base, rank: 8}", {"base": {"rank": 4, "seed": 1}, "job": {"rank": 8, "seed": 1}}),
        ("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: [*a, *b], x: 3}", {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}),
        ("[1e-3, 2.5e4, -1E+2, 1e, 0x1e, '1e-3']", [0.001, 25000.0, -100.0, "1e", 30, "1e-3"]),
        ("[12e34567, 1e-0003, 1e999, -1.0e+999, 1e308, -.inf]", ["12e34567", "1e-0003", "1e999", "-1.0e+999", 1e308, -math.inf]),
        ('{"a": {"b": 1}, "b": {"a": 1}}', {"a": {"b": 1}, "b": {"a": 1}}),
    ],
)
def test_what_is_yaml_is_what_it_says(text: str, found: Any) -> None:
    assert read_yaml(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "expected"),
        ("\ta: 1", "cannot start any token"),
        ("a: 2026-13-45", "month must be in 1..12"),
        (f"a: {'9' * 5000}", "digits"),
        ("a: " + "[" * 5000, "too deep"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("a: !!bool maybe", "none of the type that its tag"),
        ("a: !!timestamp x", "none of the type that its tag"),
        ("a: !!int ''", "none of the type that its tag"),
        ("a: 1\nb: 2\na: 3", "`a` stands there more than once: leave one of them"),
        ("job: {method: {steps: 1, 'steps': 2}}", "`steps` stands there more than once"),
        ('{"a": 1, "a": 2}', "`a` stands there more than once"),
    ],
)
def test_what_is_none_or_says_two_things_of_one_name_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_yaml(text)
