from typing import Any

import pytest
from hypothesis import given as all_of
from hypothesis import strategies as st

from bloomery.grade.template import Missing, parse_template
from bloomery.types.errors import InvalidInput
from tests.grade.builders import given

CALL = {"id": "c", "type": "function", "function": {"name": "get_acceptors", "arguments": '{"smiles": "CC"}'}}


def fill(text: str, output: str = "out", tools: Any = (), **item: Any) -> str:
    return parse_template(text, "input").fill(given(output, tools, **item))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("{{item.a}}", "one"),
        ("{{ item.a }}-{{  sample.output_text}}", "one-out"),
        ("{{ item.deep.list[1].x }}", "2.5"),
        ("{{ item['deep']['a key'] }}", "kept"),
        ('{{ item["deep"].list }}', '[1, {"x": 2.5}]'),
        ("{{ item.flag }} {{ item.none }} {{ item.number }}", "true null 1.0"),
        ("{{ item.deep.umlaut }}", '{"ü": "ß"}'),
        ("{{ sample.choices[0].message.content }}", "out"),
        ("{ item.a } }} {", "{ item.a } }} {"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("{{ item.dashed-name }}", "d"),
    ],
)
def test_references_are_filled_in(text: str, expected: str) -> None:
    deep = {"list": [1, {"x": 2.5}], "a key": "kept", "umlaut": {"ü": "ß"}}
    assert fill(text, a="one", deep=deep, flag=True, none=None, number=1.0, **{"dashed-name": "d"}) == expected


def test_tool_calls_are_reached_as_the_published_example_does() -> None:
    assert fill("{{sample.output_tools[0].function.name}}", tools=[CALL]) == "get_acceptors"
    assert fill("{{sample.output_tools[0].function.arguments}}", tools=[CALL]) == '{"smiles": "CC"}'


def test_an_output_that_is_json_is_reached_by_its_fields() -> None:
    assert fill("{{ sample.output_json.name }}", output='{"name": "Ada", "n": [1]}') == "Ada"
    assert fill("{{ sample.output_json }}", output="[1, 2]") == "[1, 2]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ item.b }}", "`item` has no `b`"),
        ("{{ item.a.b }}", "`item.a` is no object"),
        ("{{ item.a[0] }}", "`item.a` is no list"),
        ("{{ item.list[2] }}", "`item.list` has 2 entries"),
        ("{{ sample.output_json.x }}", "the output is not JSON"),
        ("{{ sample.output_tools[0].function.name }}", "`sample.output_tools` has 0 entries"),
    ],
)
def test_what_is_missing_is_never_an_empty_text(text: str, says: str) -> None:
    with pytest.raises(Missing, match="leads nowhere") as missing:
        fill(text, a="one", list=[1, 2])
    assert says in str(missing.value)


@pytest.mark.parametrize(
    "text",
    [
        "{{}}",
        "{{ x }}",
        "{{ items.a }}",
        "{{ item }}",
        "{{ sample }}",
        "{{ sample.output_tex }}",
        "{{ item.a | upper }}",
        "{{ item.a + 1 }}",
        "{{ item.a() }}",
        "{{ item[-1] }}",
        "{{ item..a }}",
        "{{ item." + "a." * 40 + "a }}",
        "{{ sample.output_text }}{{ env.KEY }}",
    ],
)
def test_what_is_no_reference_is_refused_before_any_row(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_template(text, "grader.input")
    assert refused.value.field == "grader.input"


def test_braces_in_what_is_filled_in_are_text() -> None:
    assert fill("{{ sample.output_text }}", output="{{ item.secret }}", secret="no") == "{{ item.secret }}"


@all_of(st.text(max_size=80), st.text(max_size=20))
def test_any_text_is_read_or_refused_and_values_stand_as_they_are(text: str, value: str) -> None:
    try:
        template = parse_template(text, "input")
    except InvalidInput:
        return
    if not template.references:
        assert template.fill(given()) == text
    assert fill("<{{ item.v }}>", v=value) == f"<{value}>"
