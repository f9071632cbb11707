"""Against `transformers`: the same tokens for the same messages, whatever the template."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bloomery.models.tiny.tokenizer import CHAT_TEMPLATE
from bloomery.render import ChatTokenizer, chatml
from tests.render import builders

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in rest %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content | trim + "<|eot_id|>" }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% set ns = namespace(system="") %}{% for message in messages %}
    {%- if message["role"] == "system" %}{% set ns.system = message["content"] + "\\n\\n" %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}{{ "[INST] " + ns.system + message["content"] + " [/INST]" }}{% set ns.system = "" %}
    {%- elif message["role"] == "assistant" %}{{ " " + message["content"] + eos_token }}
    {%- else %}{{ raise_exception("only user and assistant, not " + message["role"]) }}{% endif %}
{%- endfor %}"""
TOOLS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }} {{ tool.parameters | tojson(indent=2) }}
{% endfor %}Month: {{ strftime_now("%Y-%m") }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORMATS = {
    "chatml in process": (builders.byte_level(), builders.CHATML, {"eos_token": "<|im_end|>"}),
    "chatml in the sandbox": (builders.byte_level(), builders.CHATML + "{# other #}", {"eos_token": "<|im_end|>"}),
    "llama": (builders.byte_level(builders.LLAMA_SPECIAL), LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}),
    "mistral": (builders.metaspace(), MISTRAL, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "tools": (builders.byte_level(), TOOLS, {"eos_token": "<|im_end|>"}),
}
CONVERSATIONS = [
    [{"role": "user", "content": "The quick fox?"}],
    [{"role": "system", "content": "You are helpful.  \n"}, {"role": "user", "content": "\n\n  naïve café 東京 🔥\n"}],
    [
        {"role": "user", "content": "What is 12 times 3?"},
        {"role": "assistant", "content": "It is 36."},
        {"role": "user", "content": ' {"a": [1, 2]}', "name": None},
    ],
]
TOOL = {"name": "add", "description": "Adds <a> & 'b'", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def saved(directory: Path, tokenizer: Tokenizer, template: str, named: dict[str, str]) -> Path:
    """As `transformers` saves it."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(params=FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path, *FORMATS[request.param])


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompts_are_those_of_transformers(directory: Path, messages: list[dict[str, str]]) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(directory), ChatTokenizer.load(directory)
    for asks in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
        assert ours.render_prompt(messages, add_generation_prompt=asks) == expected
    assert ours.decode(expected) == theirs.decode(expected)
    assert ours.encode("The fox") == theirs("The fox")["input_ids"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    directory = saved(tmp_path, *FORMATS["tools"])
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(CONVERSATIONS[0], tools=[TOOL], return_dict=False)
    assert ChatTokenizer.load(directory).render_prompt(CONVERSATIONS[0], add_generation_prompt=False, tools=[TOOL]) == expected


def test_loss_weights_are_the_assistant_mask_of_transformers(tmp_path: Path) -> None:
    directory = saved(tmp_path, *FORMATS["llama"])
    messages = [*CONVERSATIONS[2], {"role": "assistant", "content": " Two numbers, 東京. "}]
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    tokens, weights = ChatTokenizer.load(directory).render_training(messages)
    assert tokens == expected["input_ids"]
    assert weights == expected["assistant_masks"]


def test_template_of_the_shipped_model_is_rendered_in_process() -> None:
    assert CHAT_TEMPLATE in chatml.TEMPLATES
    assert builders.CHATML in chatml.TEMPLATES


@pytest.mark.parametrize("template", sorted(chatml.TEMPLATES))
def test_every_template_known_by_heart_is_rendered_as_jinja_renders_it(tmp_path: Path, template: str) -> None:
    by_heart = ChatTokenizer.load(builders.chatml_directory(tmp_path / "a", template))
    by_jinja = ChatTokenizer.load(builders.chatml_directory(tmp_path / "b", template + "{# other #}"))
    for messages in CONVERSATIONS:
        assert by_heart.render_prompt(messages) == by_jinja.render_prompt(messages)
        assert by_heart.render_prompt(messages, False) == by_jinja.render_prompt(messages, False)
