"""Graders over the unmodified `openai` SDK: OpenAI's published examples, run and validated here."""

import json
from typing import Any, cast

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning.alpha import GraderRunResponse

from bloomery.grade.endpoints import Endpoint
from bloomery.grade.grader import Grader, sample_of
from bloomery.types.errors import NotFound
from bloomery.types.grading import GradeInput
from tests.api.server import KEY
from tests.openai.server import CONTEXT, Script, ScriptedServer
from tests.render.builders import byte_level

CITY = {"type": "string_check", "name": "city", "operation": "eq", "input": "{{ sample.output_text }}", "reference": "{{ item.city }}"}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "tiny",
    "input": [
        {"role": "developer", "content": "You are an expert grader."},
        {"role": "user", "content": "Reference: {{ item.reference_answer }}. Model answer: {{ sample.output_text }}"},
    ],
    "sampling_params": {"max_completions_tokens": 32768, "top_p": 1, "temperature": 0.5, "seed": 42, "reasoning_effort": "medium"},
}
FUZZY = """
from rapidfuzz import fuzz, utils

def grade(sample, item) -> float:
    output_text = sample["output_text"]
    reference_answer = item["reference_answer"]
    return fuzz.WRatio(output_text, reference_answer, processor=utils.default_process) / 100.0
"""


def run(sdk: OpenAI, grader: Any, sample: str, **item: Any) -> GraderRunResponse:
    return sdk.fine_tuning.alpha.graders.run(grader=grader, model_sample=sample, item=item)


def flags(answer: GraderRunResponse) -> set[str]:
    """The errors that are set; the SDK shows some of them under two names."""
    return {name.removeprefix("api_") for name, told in answer.metadata.errors.model_dump().items() if told is True}


def verdict(result: Any) -> str:
    return json.dumps({"steps": [{"description": "d", "conclusion": "c"}], "result": result})


def test_a_string_check_is_run(sdk: OpenAI) -> None:
    answer = run(sdk, CITY, "Paris", city="Paris")
    assert (answer.reward, answer.metadata.name, answer.metadata.type) == (1.0, "city", "string_check")
    assert (flags(answer), answer.sub_rewards, answer.metadata.token_usage) == (set(), {}, None)
    assert answer.metadata.execution_time >= 0
    assert run(sdk, CITY, "Rome", city="Paris").reward == 0.0


def test_the_published_multi_grader_compares_the_fields_of_an_output(sdk: OpenAI) -> None:
    grader = {
        "type": "multi",
        "graders": {
            "name": {
                "name": "name_grader",
                "type": "text_similarity",
                "input": "{{sample.output_json.name}}",
                "reference": "{{item.name}}",
                "evaluation_metric": "fuzzy_match",
                "pass_threshold": 0.9,
            },
            "email": {
                "name": "email_grader",
                "type": "string_check",
                "input": "{{sample.output_json.email}}",
                "reference": "{{item.email}}",
                "operation": "eq",
            },
        },
        "calculate_output": "(name + email) / 2",
    }
    answer = run(sdk, grader, json.dumps({"name": "John Doe", "email": "other@x.com"}), name="john doe", email="john@x.com")
    assert (answer.reward, answer.sub_rewards) == (0.5, {"name": 1.0, "email": 0.0})
    not_json = run(sdk, grader, "John Doe", name="john doe", email="john@x.com")
    assert (not_json.reward, flags(not_json)) == (0.0, {"sample_parse_error"})


def test_the_published_python_grader_runs_in_the_jail(sdk: OpenAI) -> None:
    answer = run(
        sdk, {"type": "python", "source": FUZZY, "image_tag": "2025-05-08"}, "fuzzy wuzzy was a bear", reference_answer="fuzzy wuzzy had no hair"
    )
    assert 0.5 < answer.reward < 1.0
    assert answer.metadata.type == "python"
    failed = run(sdk, {"type": "python", "name": "p", "source": FUZZY}, "fuzzy wuzzy was a bear")
    assert (failed.reward, flags(failed)) == (0.0, {"python_grader_runtime_error"})
    assert "KeyError" in (failed.metadata.errors.python_grader_runtime_error_details or "")


def test_a_judge_is_a_model_of_this_server(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script = Script(says=[verdict(0.25)])
    answer = run(sdk, JUDGE, "Paris", reference_answer="paris")
    assert (answer.reward, answer.metadata.sampled_model_name, flags(answer)) == (0.25, "tiny", set())
    (request,) = server.scripted.requests
    assert (request.params.seed, request.params.temperature, request.grammar is not None) == (42, 0.5, True)
    assert request.params.max_tokens < CONTEXT
    used = request.prompt.shape[0] + len(byte_level().encode(verdict(0.25), add_special_tokens=False).ids) + 1
    assert answer.metadata.token_usage == used
    assert answer.api_model_grader_token_usage_per_model == {"tiny": used}


def test_a_judge_without_a_verdict_is_flagged(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script = Script(says=["I like it"])
    answer = run(sdk, JUDGE, "Paris", reference_answer="paris")
    assert (answer.reward, flags(answer), len(server.scripted.requests)) == (0.0, {"model_grader_parse_error"}, 3)


async def test_a_grader_outside_of_the_server_asks_it_as_any_endpoint(server: ScriptedServer) -> None:
    grader = Grader.parse({**JUDGE, "sampling_params": {"seed": 3, "max_completions_tokens": 99}})
    server.scripted.script = Script(says=[verdict(0.75)])
    row = GradeInput(item={"reference_answer": "paris"}, sample=sample_of("Paris"))
    async with Endpoint(f"{server.url}/v1", KEY) as models:
        (result,) = await grader.grade([row], models=models)
        assert (result.score, result.reason) == (0.75, "d: c")
        (request,) = server.scripted.requests
        assert (request.params.seed, request.params.max_tokens, request.grammar is not None) == (3, 99, True)
        assert len((await models.embed("tiny", ["a", "b"])).vectors) == 2
        with pytest.raises(NotFound):
            await Grader.parse({**JUDGE, "model": "none", "sampling_params": None}).grade([row], models=models)
        # What an endpoint does not take is the grader's affair, and no score.
        (result,) = await Grader.parse(JUDGE).grade([row], models=models)
        assert result.error is not None
        assert (result.error.kind, "reasoning_effort" in result.error.detail) == ("no_score", True)


def test_a_label_model_is_run_too(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script = Script(says=[verdict("good")])
    labels = {**JUDGE, "type": "label_model", "labels": ["good", "bad"], "passing_labels": ["good"]}
    assert run(sdk, labels, "Paris", reference_answer="paris").reward == 1.0


def test_who_is_away_is_no_reward_of_0(server: ScriptedServer, sdk: OpenAI) -> None:
    server.scripted.script = Script(says=[verdict(1)], abort_after=0)
    with pytest.raises(openai.InternalServerError) as away:
        run(sdk, JUDGE, "Paris", reference_answer="paris")
    assert (away.value.status_code, away.value.code) == (503, "unavailable")


def test_cosine_asks_a_model_of_this_server_for_vectors(sdk: OpenAI) -> None:
    cosine = {"type": "text_similarity", "name": "c", "input": "a", "reference": "b", "evaluation_metric": "cosine"}
    assert run(sdk, {**cosine, "embedding_model": "tiny"}, "").reward == pytest.approx(1.0)
    with pytest.raises(openai.NotFoundError) as missing:
        run(sdk, cosine, "")
    assert "text-embedding-3-large" in missing.value.message


def test_a_judge_that_is_not_there_is_a_model_that_is_not_found(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        run(sdk, {**JUDGE, "model": "gpt-4o-2024-08-06"}, "Paris", reference_answer="paris")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_a_row_without_the_field_is_flagged(sdk: OpenAI) -> None:
    answer = run(sdk, CITY, "Paris")
    assert (answer.reward, flags(answer)) == (0.0, {"invalid_variable_error"})
    assert sdk.fine_tuning.alpha.graders.run(grader=cast(Any, {**CITY, "reference": "Paris"}), model_sample="Paris").reward == 1.0


@pytest.mark.parametrize(
    "grader", [CITY, JUDGE, {"type": "multi", "name": "m", "graders": {"a": CITY}, "calculate_output": "1 - a"}], ids=lambda g: g["type"]
)
def test_a_grader_that_is_one_is_given_back(sdk: OpenAI, grader: Any) -> None:
    answer = sdk.fine_tuning.alpha.graders.validate(grader=grader)
    assert answer.grader is not None
    assert answer.grader.to_dict() == grader


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        ({**CITY, "operation": "neq"}, "grader.operation"),
        ({**JUDGE, "range": [1, 0]}, "grader.range"),
        ({"type": "multi", "name": "m", "graders": {"a": {**CITY, "input": "{{ x }}"}}, "calculate_output": "a"}, "grader.graders.a.input"),
        ({"type": "multi", "name": "m", "graders": {"a": CITY}, "calculate_output": "__import__('os')"}, "grader.calculate_output"),
    ],
)
def test_what_is_no_grader_is_refused_with_the_path(sdk: OpenAI, grader: Any, param: str) -> None:
    for refused in (
        lambda: sdk.fine_tuning.alpha.graders.validate(grader=grader),
        lambda: run(sdk, grader, "Paris", city="Paris"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            refused()
        assert (error.value.param, error.value.code) == (param, "invalid")


@pytest.mark.parametrize("body", [{}, {"grader": 3}, {"grader": {}, "extra": 1}, {"grader": {}, "model_sample": None}])
def test_bodies_are_closed(server: ScriptedServer, body: Any) -> None:
    for verb in ("run", "validate"):
        answer = server.http.post(f"/v1/fine_tuning/alpha/graders/{verb}", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
