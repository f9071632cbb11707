"""How functions of graders are called, and what counts as a score, without a jail: the code is the same inside."""

import math
from typing import Any

import numpy as np
import pytest

from bloomery.grade.calling import Grader, NoScore, Outcome, loaded
from bloomery.types.grading import MOST_SCORE, GradeInput, Sample


def row(output: str = "text", /, **item: object) -> dict[str, Any]:
    sample = Sample(output_text=output)
    return GradeInput(item=item, sample=sample, messages=[{"role": "user", "content": "why"}]).model_dump()


def grader(source: str, entry: str = "score", style: str = "auto") -> Grader:
    return loaded(source, entry, style)


def outcome(source: str, given: dict[str, Any] | None = None, style: str = "auto") -> Outcome:
    (found,) = grader(f"def score({source.partition('):')[0]}):{source.partition('):')[2]}", style=style).outcomes([given or row()])
    return found


def test_arguments_of_plain_functions_are_bound_by_their_names() -> None:
    assert outcome("output, reference): return output == reference", row("a", reference="a"))["score"] == 1.0
    assert outcome("completion, references): return completion in references", row("a", reference="a"))["score"] == 1.0
    assert outcome("reference): return len(reference)", row(references=["abc", "d"]))["score"] == 3.0
    assert outcome("difficulty, messages, trace): return difficulty + len(messages) + (trace is None)", row(difficulty=3))["score"] == 5.0
    assert outcome("item, /, sample): return len(item) + len(sample['output_text'])", row("abc", a=1))["score"] == 4.0
    assert outcome("output, bonus=0.5, *rest): return bonus")["score"] == 0.5
    assert outcome("output, **more): return len(more)", row(a=1, b=2, output="of the row"))["score"] == 2.0


def test_what_the_contract_names_is_not_replaced_by_a_field_of_the_row() -> None:
    assert outcome("output): return output == 'said'", row("said", output="forged"))["score"] == 1.0


def test_openai_graders_are_called_by_place() -> None:
    source = "s, i): return s['output_text'] == i['answer'] and s['choices'] == [] and s['output_tools'] == []"
    assert outcome(source, row("42", answer="42"), "openai")["score"] == 1.0


def test_a_parameter_that_the_row_does_not_have_is_named() -> None:
    found = outcome("output, grade_level): return 1", row(level=3))
    assert found["kind"] == "template"
    assert found["detail"].startswith("the function wants `grade_level`, and the row has no such field: there are completion, item, level,")


def test_coroutines_are_awaited() -> None:
    (found,) = grader("async def score(output):\n    return 0.5").outcomes([row()])
    assert found["score"] == 0.5


@pytest.mark.parametrize(
    ("given", "score"),
    [
        ("True", 1.0),
        ("False", 0.0),
        ("3", 3.0),
        ("0.5", 0.5),
        ("np.float32(0.5)", 0.5),
        ("np.array([0.25])[0]", 0.25),
        ("Fraction(1, 4)", 0.25),
        ("-1e100", -MOST_SCORE),
    ],
)
def test_what_counts_as_a_number(given: str, score: float) -> None:
    (found,) = grader(f"import numpy as np\nfrom fractions import Fraction\ndef score(output):\n    return {given}").outcomes([row()])
    assert found == {"score": score, "reason": None, "metrics": {}}


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ("None", "no_score", "the score is None"),
        ("'1.0'", "wrong_type", "the score is a str, and not a number"),
        ("b'1'", "wrong_type", "a bytes"),
        ("[1.0]", "wrong_type", "a list"),
        ("1j", "wrong_type", "a complex"),
        ("np.ones(2)", "wrong_type", "a ndarray, which is no single number"),
        ("float('nan')", "not_finite", "the score is nan"),
        ("float('-inf')", "not_finite", "the score is -inf"),
        ("10 ** 400", "not_finite", "larger than any float"),
        ("-1.1e100", "not_finite", "the score is -1.1e+100, and 1e+100 is the most"),
        ("{}", "no_score", "the score is None"),
        ("{'score': '1'}", "wrong_type", "a str"),
        ("{'score': 1.0, 'metrics': {'length': float('nan')}}", "not_finite", "the metric length is nan"),
        ("{'score': 1.0, 'metrics': [1]}", "wrong_type", "`metrics` are"),
        ("{'score': 1.0, 'is_score_valid': False, 'reason': 'too short'}", "no_score", "not valid: too short"),
        ("1 / 0", "raised", "line 3, in score: ZeroDivisionError: division by zero"),
        ("exit()", "raised", "SystemExit"),
    ],
)
def test_what_is_no_score_is_a_failure_with_its_kind_and_never_a_zero(given: str, kind: str, says: str) -> None:
    (found,) = grader(f"import numpy as np\ndef score(output):\n    return {given}").outcomes([row()])
    assert found["kind"] == kind
    assert says in found["detail"]
    assert "score" not in found


def test_reasons_and_metrics_come_with_the_score_of_a_mapping_or_an_object() -> None:
    expected = {"score": 0.5, "reason": "half", "metrics": {"length": 3.0, "deep": 1.0}}
    as_mapping = "{'score': 0.5, 'reason': 'half', 'metrics': {'length': 3, 'deep': {'score': True}}}"
    assert outcome(f"output): return {as_mapping}") == expected
    as_object = f"from types import SimpleNamespace\ndef score(output):\n    return SimpleNamespace(is_score_valid=True, **{as_mapping})"
    assert grader(as_object).outcomes([row()]) == [expected]


def test_reward_functions_of_trl_get_columns() -> None:
    checked = "assert columns == {'level': [1, 2]}"
    source = f"def score(prompts, completions, answer, **columns):\n    {checked}\n    return [float(c == a) for c, a in zip(completions, answer)]"
    rows = [row("4", prompt="2+2", answer="4", level=1), row("5", prompt="3+3", answer="6", level=2)]
    found = grader(source)
    assert found.together
    assert [each["score"] for each in found.outcomes(rows)] == [1.0, 0.0]


def test_reward_functions_of_trl_get_messages_where_prompts_are_messages() -> None:
    each = "len(c[0]['content']) + len(p) + (c[0]['role'] == 'assistant')"
    source = f"def score(completions, prompts, **columns):\n    return [{each} for c, p in zip(completions, prompts)]"
    assert [each["score"] for each in grader(source).outcomes([row("abc"), row("a")])] == [5.0, 3.0]


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("[1.0]", ["wrong_type", "wrong_type"]),
        ("1.0", ["wrong_type", "wrong_type"]),
        ("'12'", ["wrong_type", "wrong_type"]),
        ("[None, float('inf')]", ["no_score", "not_finite"]),
        ("1 / 0", ["raised", "raised"]),
    ],
)
def test_a_batch_of_another_length_or_type_scores_nobody(given: str, kinds: list[str]) -> None:
    found = grader(f"def score(completions, **columns):\n    return {given}").outcomes([row(), row()])
    assert [each["kind"] for each in found] == kinds


def test_an_array_of_scores_is_a_list_of_them() -> None:
    found = grader("import numpy as np\ndef score(completions, **columns):\n    return np.arange(len(completions)) / 2").outcomes([row(), row()])
    assert [each["score"] for each in found] == [0.0, 0.5]


@pytest.mark.parametrize(("style", "package"), [("eval_protocol", "eval-protocol"), ("verifiers", "verifiers")])
def test_styles_of_packages_say_which_package_is_missing(style: str, package: str) -> None:
    with pytest.raises(NoScore, match=f"need the package {package}: install it"):
        grader("def score(output): return 1", style=style)


def test_a_source_without_the_function_is_refused() -> None:
    with pytest.raises(NoScore, match="the source has no function `score`"):
        grader("score = 3")


def test_numbers_that_only_say_that_they_are_some_are_asked() -> None:
    """The contract is what float() says, for whatever has it."""
    assert math.isclose(outcome("output): return " + repr(float(np.pi)))["score"], math.pi)
