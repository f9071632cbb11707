"""What is taken as a grader: OpenAI's published examples unmodified, and whatever the `openai` SDK's own types describe."""

import copy
from typing import Any

import pytest
from openai.types import eval_create_params, graders
from pydantic import TypeAdapter, ValidationError

from bloomery.grade.declared import Multi, ScoreModel, canonical, parse_spec
from bloomery.grade.grader import Grader
from bloomery.grade.pool import SOURCE_BYTES
from bloomery.types.errors import InvalidInput

STRING_CHECK = {"type": "string_check", "name": "city", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "{{ item.city }}"}
SIMILARITY = {
    "type": "text_similarity",
    "name": "name_grader",
    "input": "{{sample.output_json.name}}",
    "reference": "{{item.name}}",
    "evaluation_metric": "fuzzy_match",
}
SCORE_MODEL = {
    "type": "score_model",
    "name": "my_score_model",
    "input": [
        {"role": "system", "content": "You are an expert grader."},
        {"role": "user", "content": "Reference: {{ item.reference_answer }}. Model answer: {{ sample.output_text }}"},
    ],
    "model": "o4-mini-2025-04-16",
    "range": [0, 1],
    "sampling_params": {"max_completions_tokens": 32768, "top_p": 1, "reasoning_effort": "medium"},
}
LABEL_MODEL = {
    "type": "label_model",
    "name": "my_label_model",
    "input": [{"role": "user", "content": "Classify this: {{ sample.output_text }} as either good or bad."}],
    "passing_labels": ["good"],
    "labels": ["good", "bad"],
    "model": "o3-mini-2025-01-31",
}
PYTHON = {"type": "python", "name": "code", "source": "def grade(sample, item):\n    return 1.0", "image_tag": "2025-05-08"}
MULTI = {
    "type": "multi",
    "name": "both",
    "graders": {"name": SIMILARITY, "city": STRING_CHECK, "judge": SCORE_MODEL, "label": LABEL_MODEL, "code": PYTHON},
    "calculate_output": "(name + city) / 2 + 0 * judge",
}
FUNCTION = {"type": "function", "source": "def score(output, reference): return 1", "entry": "score", "style": "plain"}
SDK_TYPES: dict[str, tuple[Any, Any]] = {
    "string_check": (graders.StringCheckGraderParam, graders.StringCheckGrader),
    "text_similarity": (graders.TextSimilarityGraderParam, graders.TextSimilarityGrader),
    "score_model": (graders.ScoreModelGraderParam, graders.ScoreModelGrader),
    "label_model": (graders.LabelModelGraderParam, graders.LabelModelGrader),
    "python": (graders.PythonGraderParam, graders.PythonGrader),
}
PUBLISHED = [STRING_CHECK, SIMILARITY, SCORE_MODEL, LABEL_MODEL, PYTHON]


def changed(spec: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """A copy with another value at a place."""
    copied = copy.deepcopy(spec)
    place: Any = copied
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return copied


@pytest.mark.parametrize("spec", [*PUBLISHED, MULTI, FUNCTION], ids=lambda spec: spec["type"])
def test_reading_what_was_read_gives_the_same_grader(spec: dict[str, Any]) -> None:
    read = Grader.parse(spec)
    again = Grader.parse(read.canonical)
    assert (again.spec, again.hash) == (read.spec, read.hash)


@pytest.mark.parametrize("spec", PUBLISHED, ids=lambda spec: spec["type"])
def test_what_the_sdk_types_describe_is_read_and_what_is_read_they_accept(spec: dict[str, Any]) -> None:
    described, answered = SDK_TYPES[spec["type"]]
    TypeAdapter(described).validate_python(spec, strict=True)
    model = answered.model_validate(canonical(parse_spec(spec)), strict=True)
    assert not model.model_extra
    assert model.type == spec["type"]


@pytest.mark.parametrize(
    ("spec", "criterion"),
    [
        ({**SIMILARITY, "pass_threshold": 0.8}, eval_create_params.TestingCriterionTextSimilarity),
        ({**PYTHON, "pass_threshold": 0.5}, eval_create_params.TestingCriterionPython),
        ({**SCORE_MODEL, "pass_threshold": 0.5}, eval_create_params.TestingCriterionScoreModel),
    ],
)
def test_testing_criteria_of_evals_are_graders_with_a_threshold(spec: dict[str, Any], criterion: Any) -> None:
    TypeAdapter(criterion).validate_python(spec)
    assert parse_spec(spec).pass_threshold == spec["pass_threshold"]


def test_a_multi_grader_as_the_sdk_types_spell_it_holds_one_grader_under_its_own_name() -> None:
    read = parse_spec({"type": "multi", "name": "m", "graders": STRING_CHECK, "calculate_output": "1 - city"})
    assert isinstance(read, Multi)
    assert list(read.graders) == ["city"]


def test_examples_of_the_guide_that_leave_things_out_are_read() -> None:
    assert Grader.parse({"type": "python", "source": PYTHON["source"]}).name == "python"
    label = {**LABEL_MODEL, "sampling_params": {"max_tokens": 32768, "top_p": 1, "seed": 42, "reasoning_effort": "medium"}}
    assert canonical(parse_spec(label))["sampling_params"]["max_completions_tokens"] == 32768
    unnamed = changed(MULTI, "graders", to={"a": {key: value for key, value in STRING_CHECK.items() if key != "name"}})
    assert Grader.parse({**unnamed, "calculate_output": "a"}).name == "both"


@pytest.mark.parametrize(
    "content",
    [
        "Judge {{ item.a }}",
        {"type": "input_text", "text": "Judge {{ item.a }}"},
        {"type": "output_text", "text": "Judge {{ item.a }}"},
        ["Judge {{ item.a }}"],
        [{"type": "input_text", "text": "Judge {{ item.a }}"}, {"type": "input_image", "image_url": "{{ item.url }}", "detail": "low"}],
        [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}],
    ],
)
def test_every_published_form_of_a_message_is_read(content: Any) -> None:
    read = parse_spec(changed(SCORE_MODEL, "input", 0, "content", to=content))
    assert isinstance(read, ScoreModel)
    assert read.input[0].content


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        (None, "grader", "must be a JSON object"),
        ({}, "grader.type", "is missing"),
        ({"type": "vibes"}, "grader.type", "is `vibes`: graders are string_check"),
        ({"type": ["python"]}, "grader.type", "is no text"),
        (changed(STRING_CHECK, "operation", to="neq"), "grader.operation", "'eq', 'ne'"),
        (changed(STRING_CHECK, "unknown", to=1), "grader.unknown", "not permitted"),
        (changed(STRING_CHECK, "input", to="{{ nowhere }}"), "grader.input", "is no reference"),
        (changed(SIMILARITY, "evaluation_metric", to="rouge_6"), "grader.evaluation_metric", "rouge_5"),
        (changed(SCORE_MODEL, "range", to=[1, 0]), "grader.range", "lower end first"),
        (changed(SCORE_MODEL, "range", to=[0, float("inf")]), "grader.range.1", "finite"),
        (changed(SCORE_MODEL, "input", to=[]), "grader.input", "at least 1"),
        (changed(SCORE_MODEL, "input", 1, "role", to="tool"), "grader.input.1.role", "'developer'"),
        (changed(SCORE_MODEL, "input", 1, "content", to="{{ x }}"), "grader.input.1.content.0", "is no reference"),
        (changed(SCORE_MODEL, "input", 1, "content", to=[{"type": "input_video"}]), "grader.input.1.content.0", "input_video"),
        (changed(SCORE_MODEL, "sampling_params", to={"top_p": 0}), "grader.sampling_params.top_p", "greater than 0"),
        (
            changed(SCORE_MODEL, "sampling_params", to={"max_tokens": 1, "max_completion_tokens": 2}),
            "grader.sampling_params",
            "names of one thing",
        ),
        (changed(LABEL_MODEL, "passing_labels", to=["great"]), "grader.passing_labels", "`great` is none of the labels"),
        (changed(LABEL_MODEL, "labels", to=["good", "good"]), "grader.labels", "twice"),
        (changed(PYTHON, "source", to="#" * SOURCE_BYTES), "grader.source", "fewer than 256000"),
        (changed(FUNCTION, "style", to="haskell"), "grader.style", "'plain'"),
        (changed(FUNCTION, "entry", to="a.b"), "grader.entry", "pattern"),
        (changed(MULTI, "graders", to={}), "grader.graders", "at least 1"),
        (changed(MULTI, "graders", to=[STRING_CHECK]), "grader.graders", "an object of graders"),
        (changed(MULTI, "graders", "city", "operation", to="x"), "grader.graders.city.operation", "'eq'"),
        (changed(MULTI, "graders", "city", "input", to="{{ x }}"), "grader.graders.city.input", "is no reference"),
        (changed(MULTI, "graders", "city", to=MULTI), "grader.graders.city.type", "no other multi grader"),
        (changed(MULTI, "calculate_output", to="name +"), "grader.calculate_output", "ends where"),
        (changed(MULTI, "calculate_output", to="nome"), "grader.calculate_output", "names `nome`"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(spec: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        parse_spec(spec)
    assert refused.value.field == field
    assert f"`{field}`" in refused.value.message or refused.value.message.startswith(f"`{field}.")


@pytest.mark.parametrize("text", ["{", "[1", "1" + "0" * 5000, "[" * 100_000])
def test_text_that_is_no_json_of_a_grader_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Grader.parse(text)
    assert refused.value.field == "grader"


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse_spec(STRING_CHECK).input = "x"  # type: ignore[misc, union-attr]


def test_the_hash_is_of_what_is_asked_for_and_not_of_how_it_is_spelled() -> None:
    spelled = {key: LABEL_MODEL[key] for key in reversed(LABEL_MODEL)} | {"sampling_params": None}
    spelled["input"] = [{"role": "user", "content": [{"type": "input_text", "text": LABEL_MODEL["input"][0]["content"]}]}]  # type: ignore[index]
    assert Grader.parse(spelled).hash == Grader.parse(LABEL_MODEL).hash
    assert Grader.parse({**SCORE_MODEL, "range": None}).hash == Grader.parse(SCORE_MODEL).hash
    assert Grader.parse(changed(MULTI, "graders", "city", "operation", to="ne")).hash != Grader.parse(MULTI).hash
    assert len({Grader.parse(spec).hash for spec in [*PUBLISHED, MULTI, FUNCTION]}) == 7
