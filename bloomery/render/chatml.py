"""ChatML, the plainest chat format: a template known by its exact text is rendered here instead of in a process of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bloomery.types.errors import InvalidInput

TEMPLATES: Final = frozenset(
    {
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "{% for message in messages %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    }
)
"""That of `bloomery-tiny`, and the one that most tokenizers with plain ChatML carry."""


def render(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    """The text of a conversation."""
    turns = [f"<|im_start|>{message['role']}\n{_content(index, message)}<|im_end|>\n" for index, message in enumerate(messages)]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _content(index: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidInput(f"message {index} needs a text as its `content`", field=f"messages.{index}.content")
    return content
