"""What the chat template of each family of the catalog writes for calls is read again as those calls: whole, cut anywhere, and broken.

The templates here write calls in the form that the families have published, and are ours otherwise: they hold nothing but that.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bloomery.models.families import FAMILIES
from bloomery.render import tools
from bloomery.render.tokenizer import ChatTokenizer
from bloomery.render.tools import CallReader, Dialect, Function, dialect_of
from tests.render.builders import chatml_directory

BAR, LOW = "\uff5c", "\u2581"
SAYS = "I look it up."
NEAR = {"lat": 50.9, "inner": {"names": ["x", "y"], "all": True}}
SEARCH = {"query": 'say "hi" {now}\n<b> \\ K\u00f6ln', "exact": True, "limit": None, "tags": ["a", "b"], "near": NEAR, "most": -3}
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "12", "days": 3}), ("search-all", SEARCH)]
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
FUNCTIONS = [
    Function("weather", {"type": "object", "properties": {"city": {"type": ["string", "null"]}, "days": {"type": "number"}}}),
    Function("search-all", {"type": "object", "properties": {"query": {"type": "string"}, "exact": {"type": "boolean"}, "limit": OPTIONAL}}),
]

EACH = "{% for call in message.tool_calls %}{% set function = call.function %}"
PAIRS = "{% for key, value in function.arguments.items() %}"
JSON_UNLESS_TEXT = "{{ value if value is string else value | tojson }}"
# Neither JSON nor quoted: what is true is written as Python has it.
JSON_OF_LISTS_ALONE = "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
HERMES = EACH + '{{ "\\n" }}<tool_call>\n{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}\n</tool_call>{% endfor %}'
QWEN_XML = (
    f"{EACH}{{{{ '\n' }}}}<tool_call>\n<function={{{{ function.name }}}}>\n"
    f"{PAIRS}<parameter={{{{ key }}}}>\n{JSON_OF_LISTS_ALONE}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}"
)
GLM_45 = (
    f"{EACH}{{{{ '\n' }}}}<tool_call>{{{{ function.name }}}}\n"
    f"{PAIRS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{JSON_UNLESS_TEXT}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}"
)
GLM_47 = (
    f"{EACH}<tool_call>{{{{ function.name }}}}{PAIRS}<arg_key>{{{{ key }}}}</arg_key><arg_value>{JSON_UNLESS_TEXT}</arg_value>{{% endfor %}}"
    "</tool_call>{% endfor %}"
)
LLAMA = (
    '{# <|start_header_id|>ipython #}{% for call in message.tool_calls[:1] %}{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}{% endfor %}"
)
MISTRAL_V3 = (
    "[TOOL_CALLS] [" + EACH + '{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}, "id": "{{ call.id }}"}'
    '{{ "" if loop.last else ", " }}{% endfor %}]'
)
MISTRAL_V13 = EACH + "[TOOL_CALLS]{{ function.name }}[ARGS]{{ function.arguments | tojson }}{% endfor %}"
DEEPSEEK_V3 = (
    f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>{EACH}<{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>{{{{ function.name }}}}\n"
    f"```json\n{{{{ function.arguments | tojson }}}}\n```<{BAR}tool{LOW}call{LOW}end{BAR}>{{{{ '' if loop.last else '\n' }}}}{{% endfor %}}"
    f"<{BAR}tool{LOW}calls{LOW}end{BAR}>"
)
DEEPSEEK_V31 = (
    f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>{EACH}<{BAR}tool{LOW}call{LOW}begin{BAR}>{{{{ function.name }}}}<{BAR}tool{LOW}sep{BAR}>"
    f"{{{{ function.arguments | tojson }}}}<{BAR}tool{LOW}call{LOW}end{BAR}>{{% endfor %}}<{BAR}tool{LOW}calls{LOW}end{BAR}>"
)
KIMI = (
    f"<|tool_calls_section_begin|>{EACH}<|tool_call_begin|>functions.{{{{ function.name }}}}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>"
    "{{ function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
)
GEMMA = (
    "{% macro written(value) %}{% if value is string %}<|\"|>{{ value }}<|\"|>{% elif value is boolean %}{{ 'true' if value else 'false' }}"
    "{% elif value is mapping %}{{ '{' }}{% for key, inner in value.items() %}{{ '' if loop.first else ',' }}{{ key }}:{{ written(inner) }}"
    "{% endfor %}{{ '}' }}{% elif value is sequence %}[{% for inner in value %}{{ '' if loop.first else ',' }}{{ written(inner) }}{% endfor %}]"
    "{% else %}{{ value }}{% endif %}{% endmacro %}"
    + EACH
    + "<|tool_call>call:{{ function.name }}{{ written(function.arguments) }}<tool_call|>{% endfor %}"
)
# Nothing marks a call: a name, a line break and the arguments.
GLM_4 = EACH + "{{ function.name }}\n{{ function.arguments | tojson }}{% endfor %}"


class Form(NamedTuple):
    """How a family has calls written, and the dialect that it is read in; a model of Llama calls one function at a time, and says nothing before."""

    calls: str
    dialect: Dialect | None
    says: str = SAYS
    count: int = 2


PUBLISHED: dict[str, tuple[Form, ...]] = {
    "qwen3": (Form(HERMES, tools.HERMES),),
    "qwen3_moe": (Form(HERMES, tools.HERMES), Form(QWEN_XML, tools.PARAMETERS)),
    "qwen3_5_text": (Form(QWEN_XML, tools.PARAMETERS),),
    "qwen3_5_moe_text": (Form(QWEN_XML, tools.PARAMETERS),),
    "nemotron_h": (Form(QWEN_XML, tools.PARAMETERS),),
    "llama": (Form(LLAMA, tools.LLAMA, says="", count=1),),
    "ministral": (Form(MISTRAL_V3, tools.MISTRAL_LIST),),
    "ministral3": (Form(MISTRAL_V13, tools.MISTRAL),),
    "glm4": (Form(GLM_4, None),),
    "glm4_moe": (Form(GLM_45, tools.PAIRS), Form(GLM_47, tools.PAIRS)),
    "glm4_moe_lite": (Form(GLM_47, tools.PAIRS),),
    "deepseek_v3": (Form(DEEPSEEK_V3, tools.DEEPSEEK_JSON_BLOCK), Form(DEEPSEEK_V31, tools.DEEPSEEK)),
    "kimi_k2": (Form(KIMI, tools.KIMI),),
    "gemma4_text": (Form(GEMMA, tools.GEMMA),),
}
FORMS = {form: f"{family} {number}" for family, forms in reversed(PUBLISHED.items()) for number, form in enumerate(forms) if form.dialect is not None}


class Answer(NamedTuple):
    """What a model of some form writes, and what is to be read in it."""

    form: Form
    written: str

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        return CALLS[: self.form.count]

    def read(self, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
        assert self.form.dialect is not None
        reader, text, calls = CallReader(self.form.dialect, FUNCTIONS), "", []
        for place, piece in enumerate(pieces):
            heard = reader.feed(piece, final=place == len(pieces) - 1)
            text += heard.text
            for call in heard.calls:
                if call.name is not None:
                    calls.append((call.name, ""))
                calls[call.number] = (calls[call.number][0], calls[call.number][1] + call.arguments)
        return text, calls


@pytest.fixture(scope="module", params=FORMS, ids=FORMS.values())
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    return Answer(request.param, rendered(request.param, tmp_path_factory.mktemp("template")))


def template(form: Form) -> str:
    turns = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    return f"{{{{ tools | tojson }}}}{turns}{{% if message.tool_calls %}}{form.calls}{{% endif %}}<|im_end|>\n{{% endfor %}}"


def rendered(form: Form, directory: Path) -> str:
    called = [
        {"id": f"{number:09}", "type": "function", "function": {"name": name, "arguments": values}} for number, (name, values) in enumerate(CALLS)
    ]
    with closing(ChatTokenizer.load(chatml_directory(directory, template(form)))) as tokenizer:
        assert tokenizer.dialect is form.dialect
        offered = [{"type": "function", "function": function._asdict()} for function in FUNCTIONS]
        text = tokenizer.decode(tokenizer.render_prompt([{"role": "assistant", "content": form.says, "tool_calls": called}], False, offered))
    return text.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]


def test_every_family_of_the_catalog_is_here() -> None:
    assert set(PUBLISHED) == set(FAMILIES)


def test_a_call_that_nothing_marks_is_no_dialect() -> None:
    """So that `tools` are refused by name, and no answer is taken for a call that is none."""
    assert dialect_of(template(PUBLISHED["glm4"][0])) is None


def test_calls_as_the_template_writes_them_are_read(answer: Answer) -> None:
    text, calls = answer.read(answer.written)
    assert (text.strip(), [(name, json.loads(arguments)) for name, arguments in calls]) == (answer.form.says, answer.calls)


def test_a_stream_that_is_cut_at_any_character_says_the_same(answer: Answer) -> None:
    whole = answer.read(answer.written)
    assert answer.read(*answer.written) == whole
    for place in range(len(answer.written) + 1):
        assert answer.read(answer.written[:place], answer.written[place:]) == whole, place


def test_an_answer_that_is_cut_off_calls_nothing_that_was_not_written(answer: Answer) -> None:
    _, expected = answer.read(answer.written)
    for place in range(len(answer.written)):
        text, calls = answer.read(answer.written[:place])
        if not calls:
            assert text == answer.written[:place]
            continue
        *before, (name, arguments) = calls
        assert before == expected[: len(before)], place
        assert name == expected[len(before)][0], place
        # What is not JSON yet cannot be taken for all of the arguments.
        assert arguments == expected[len(before)][1] or (expected[len(before)][1].startswith(arguments) and not is_json(arguments)), place


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_a_mark_alone_and_a_mark_before_something_else_are_text(answer: Answer) -> None:
    dialect = answer.form.dialect
    assert dialect is not None
    for mark in {dialect.begin, dialect.opening, dialect.opening + dialect.begin} - {""}:
        for said in (mark, f"{mark} hm", f"Hm, {mark} and {mark}{dialect.end}."):
            assert answer.read(said) == answer.read(*said) == (said, []), said


@pytest.mark.slow
def test_a_missing_or_doubled_character_is_no_exception(answer: Answer) -> None:
    for place in range(len(answer.written)):
        for broken in (answer.written[:place] + answer.written[place + 1 :], answer.written[:place] + answer.written[place] + answer.written[place:]):
            found = answer.read(broken)
            assert answer.read(*broken) == found, broken
            assert len(found[1]) <= len(answer.calls) or found[1] == [], broken


@pytest.mark.parametrize("value", ["[" * 100_000, "[" * 100_000 + "]" * 100_000])
def test_brackets_without_end_are_no_exception(answer: Answer, value: str) -> None:
    broken = answer.written.replace("50.9", value)
    text, calls = answer.read(broken)
    assert calls or text == broken, "what is no call is said"
