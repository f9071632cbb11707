import json
from collections.abc import Sequence
from typing import Any

import pytest

from bloomery.grade.grader import Grader, sample_of
from bloomery.grade.models import Counted
from bloomery.grade.pool import Graders, Limits, Program
from bloomery.types.errors import InvalidInput, NotFound, Unavailable
from bloomery.types.grading import GradeInput, GradeResult, GradeUsage
from tests.grade.builders import USAGE, ScriptedModels, given
from tests.grade.test_declared import FUNCTION, PYTHON, SIMILARITY, STRING_CHECK


class FakeJail:
    """Says the same of every row, and keeps what it was asked."""

    def __init__(self, says: GradeResult) -> None:
        self._says = says
        self.asked: list[tuple[Program, list[GradeInput]]] = []

    async def grade(self, program: Program, inputs: Sequence[GradeInput], limits: Limits) -> list[GradeResult]:
        self.asked.append((program, list(inputs)))
        return [self._says] * len(inputs)


async def one(spec: dict[str, Any], row: GradeInput, **hands: Any) -> GradeResult:
    (result,) = await Grader.parse(spec).grade([row], **hands)
    return result


@pytest.mark.parametrize(
    ("operation", "text", "reference", "score"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "Paris", "paris", 0.0),
        ("ne", "Paris", "paris", 1.0),
        ("ne", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "It is paris.", "Paris", 0.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("like", "a%b", "%", 1.0),
        ("ilike", "It is pARIS.", "Paris", 1.0),
        ("ilike", "STRASSE", "straße", 1.0),
        ("ilike", "Rome", "Paris", 0.0),
    ],
)
async def test_string_checks_are_the_published_ones(operation: str, text: str, reference: str, score: float) -> None:
    spec = {**STRING_CHECK, "operation": operation}
    assert await one(spec, given(text, city=reference)) == GradeResult(score=score)


async def test_similarity_is_computed_of_what_templates_give() -> None:
    result = await one(SIMILARITY, given('{"name": "John Doe"}', name="john doe"))
    assert result.score == 1.0
    result = await one({**SIMILARITY, "evaluation_metric": "meteor"}, given('{"name": "dogs"}', name="dog"))
    assert result.score == 0.5
    assert "without WordNet's synonyms" in (result.reason or "")


async def test_long_texts_are_compared_too_and_those_that_take_too_long_have_no_score() -> None:
    bleu = {**SIMILARITY, "input": "{{ sample.output_text }}", "evaluation_metric": "bleu"}
    text = "word " * 5000
    assert (await one(bleu, given(text, name=text))).score == 1.0
    result = await one({**bleu, "evaluation_metric": "fuzzy_match"}, given(text, name=text))
    assert result.error is not None
    assert (result.error.kind, "8192" in result.error.detail) == ("no_score", True)


async def test_a_row_without_the_reference_fails_and_the_others_do_not() -> None:
    results = await Grader.parse(STRING_CHECK).grade([given("Paris", city="Paris"), given("Paris"), given("Rome", city="Paris")])
    assert [result.score for result in results] == [1.0, None, 0.0]
    assert results[1].error is not None
    assert results[1].error.kind == "template"


async def test_cosine_is_of_vectors_that_a_model_gives() -> None:
    models = ScriptedModels("", vector=lambda text: [1.0, 0.0] if text == "up" else [1.0, 1.0])
    cosine = {**SIMILARITY, "input": "{{ sample.output_text }}", "evaluation_metric": "cosine"}
    assert Grader.parse(cosine).models == ["text-embedding-3-large"]
    result = await one(cosine, given("up", name="across"), models=models)
    assert result.score == pytest.approx(0.5**0.5)
    assert result.usage == USAGE
    assert Grader.parse({**cosine, "embedding_model": "mine"}).models == ["mine"]


async def test_cosine_is_refused_by_the_name_of_its_model_where_nobody_has_models() -> None:
    with pytest.raises(InvalidInput, match="text-embedding-3-large"):
        await one({**SIMILARITY, "evaluation_metric": "cosine"}, given("{}", name=""))


async def test_cosine_without_vectors_is_no_score() -> None:
    cosine = {**SIMILARITY, "input": "x", "evaluation_metric": "cosine"}
    result = await one(cosine, given("", name="y"), models=ScriptedModels("", vector=lambda _: [0.0]))
    assert result.error is not None
    assert result.error.kind == "unavailable"


@pytest.mark.parametrize(
    ("spec", "program"), [(PYTHON, Program(PYTHON["source"], "grade", "openai")), (FUNCTION, Program(FUNCTION["source"], "score", "plain"))]
)
async def test_programs_run_in_the_jail_with_all_rows_at_once(spec: dict[str, Any], program: Program) -> None:
    jail = FakeJail(GradeResult(score=0.5))
    rows = [given("a"), given("b")]
    assert await Grader.parse(spec).grade(rows, jail=jail) == [GradeResult(score=0.5)] * 2
    assert jail.asked == [(program, rows)]


async def test_programs_of_every_style_are_graded_in_the_real_jail() -> None:
    published = {**PYTHON, "source": "def grade(sample, item):\n    return len(sample['output_text']) / item['most']"}
    plain = {**FUNCTION, "source": "def score(output, reference): return float(output == reference)"}
    trl = {**FUNCTION, "source": "def score(completions, most, **kwargs):\n    return [len(each) / 4 for each in completions]", "style": "auto"}
    rows = [given("ab", most=4, reference="ab", prompt="?"), given("abc", most=4, reference="ab", prompt="?")]
    async with Graders() as jail:
        graded = [await Grader.parse(spec).grade(rows, jail=jail) for spec in (published, plain, trl)]
        (failed,) = await Grader.parse(published).grade([given("ab")], jail=jail)
    assert [[result.score for result in results] for results in graded] == [[0.5, 0.75], [1.0, 0.0], [0.5, 0.75]]
    assert failed.error is not None
    assert (failed.error.kind, "KeyError" in failed.error.detail) == ("raised", True)


async def test_without_a_jail_no_program_runs() -> None:
    with pytest.raises(Unavailable, match="no jail"):
        await one(PYTHON, given())


def combined(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "name": "m", "graders": graders, "calculate_output": formula}


async def test_the_published_multi_grader_for_tool_calls() -> None:
    name = {**STRING_CHECK, "input": "get_acceptors", "reference": "{{sample.output_tools[0].function.name}}"}
    arguments = {**STRING_CHECK, "input": '{"smiles": "{{item.smiles}}"}', "reference": "{{sample.output_tools[0].function.arguments}}"}
    spec = combined("0.5 * function_name + 0.5 * arguments", function_name=name, arguments=arguments)
    call = {"type": "function", "function": {"name": "get_acceptors", "arguments": '{"smiles": "CC"}'}}
    result = await one(spec, given("", [call], smiles="CO"))
    assert (result.score, result.metrics) == (0.5, {"function_name": 1.0, "arguments": 0.0})


async def test_a_formula_without_one_of_its_scores_has_none_and_says_whose() -> None:
    spec = combined("check + 0 * code", check=STRING_CHECK, code=PYTHON)
    jail = FakeJail(GradeResult.failed("timeout", "2 minutes"))
    result = await one(spec, given("Paris", city="Paris"), jail=jail)
    assert result.error is not None
    assert (result.error.kind, result.error.detail) == ("timeout", "`code`: 2 minutes")
    assert result.metrics == {"check": 1.0}
    assert (await one({**spec, "calculate_output": "check"}, given("Paris", city="Paris"), jail=jail)).score == 1.0


@pytest.mark.parametrize("formula", ["1 / check", "check - 1.1e100"])
async def test_a_formula_that_comes_to_no_number_is_not_finite(formula: str) -> None:
    result = await one(combined(formula, check=STRING_CHECK), given("Rome", city="Paris"))
    assert result.error is not None
    assert result.error.kind == "not_finite"


async def test_usage_labels_and_parts_of_a_multi_grader_are_told() -> None:
    judge = {
        "type": "label_model",
        "name": "mood",
        "model": "m",
        "labels": ["a", "b"],
        "passing_labels": ["a"],
        "input": [{"role": "user", "content": "?"}],
    }
    models = Counted(ScriptedModels(json.dumps({"steps": [], "result": "a"})))
    grader = Grader.parse(combined("one + two", one=judge, two={**judge, "model": "n"}))
    (graded,) = await grader.grade_parts([given()], models=models)
    assert graded.result.usage == GradeUsage(prompt_tokens=20, completion_tokens=6)
    assert graded.result.labels == {"one.mood": "a", "two.mood": "a"}
    assert graded.parts["one"].score == 1.0
    assert dict(models.tokens) == {"m": 13, "n": 13}
    assert (grader.models, grader.programs, sorted(grader.judges)) == (["m", "n"], False, ["one", "two"])


async def test_a_refusal_in_one_part_ends_the_others() -> None:
    judge = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "?"}]}
    with pytest.raises(NotFound):
        await one(combined("j", j=judge, check=STRING_CHECK), given("a", city="b"), models=ScriptedModels(NotFound("no model")))


async def test_no_rows_have_no_results() -> None:
    assert await Grader.parse(STRING_CHECK).grade([]) == []


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ('{"a": 1}', {"a": 1}), ("plain", None), ("NaN", None), ("[" * 100_000, None), ("null", None), ("", None)]
)
def test_an_output_that_is_json_is_known_as_such(text: str, expected: Any) -> None:
    sample = sample_of(text)
    assert (sample.output_text, sample.output_json) == (text, expected)
    assert sample.choices[0]["message"] == {"role": "assistant", "content": text}
