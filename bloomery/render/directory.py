"""What a model directory says about its tokenizer: the files that `save_pretrained` writes, of transformers 4 and 5."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from bloomery.types.errors import InvalidInput, blame

NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens with which templates close a turn: they end an answer even where the directory names only the end of a document."""
MAX_FILE_BYTES: Final = 64 << 20
MAX_TEMPLATE_CHARS: Final = 1 << 20


class Directory(NamedTuple):
    """The tokenizer, the chat template if there is one, the special tokens by the names that templates use, and what ends an answer."""

    tokenizer: Tokenizer
    template: str | None
    named_tokens: dict[str, str]
    end_tokens: tuple[int, ...]


def read_directory(path: Path) -> Directory:
    """Read all of it; nothing in the directory is executed."""
    tokenizer = _read_tokenizer(path)
    settings = _read_json(path / "tokenizer_config.json")
    named = _named_tokens(_read_json(path / "special_tokens_map.json")) | _named_tokens(settings)
    template = _read_template(path, settings)
    return Directory(tokenizer, template, named, _end_tokens(path, tokenizer, named, template))


def _read_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise InvalidInput(f"{path} has no tokenizer: tokenizer.json is missing{_hint(path)}", field="model")
    with blame(InvalidInput, f"the tokenizer {file} cannot be read"):
        tokenizer = Tokenizer.from_file(str(file))
    # Whoever saved it may have left its own cutting and padding switched on.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _hint(path: Path) -> str:
    other = next((name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (path / name).is_file()), None)
    if other is None:
        return "; save the tokenizer into the directory of the weights"
    return f" ({other} alone is not enough); convert it with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file."""
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidInput(f"{file} is over the limit of {MAX_FILE_BYTES >> 20} MiB", field="model")
    with blame(InvalidInput, f"{file} is not JSON"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} holds a {type(content).__name__} where an object is expected", field="model")
    return content


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = ((name, _text(settings.get(name))) for name in NAMED_TOKENS)
    return {name: text for name, text in texts if text is not None}


def _text(token: Any) -> str | None:
    """A token is written as its text, or as an object with the text in it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the entry in the settings, which holds one template or several with names."""
    file = path / "chat_template.jinja"
    if file.is_file():
        with blame(InvalidInput, f"the chat template {file} cannot be read"):
            template: Any = file.read_text(encoding="utf-8")
    else:
        template = settings.get("chat_template", _read_json(path / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise InvalidInput(f"the chat template of {path} is a {type(template).__name__}, not text", field="model")
    if template is not None and len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidInput(f"the chat template of {path} is over the limit of {MAX_TEMPLATE_CHARS} characters", field="model")
    return template


def _end_tokens(path: Path, tokenizer: Tokenizer, named: Mapping[str, str], template: str | None) -> tuple[int, ...]:
    ends = _ids(_read_json(path / "generation_config.json")) or _ids(_read_json(path / "config.json"))
    texts = [named["eos_token"]] if "eos_token" in named else []
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    texts += [text for text in TURN_ENDS if text in special and text in (template or "")]
    known = (tokenizer.token_to_id(text) for text in texts)
    return tuple(dict.fromkeys([*ends, *(token for token in known if token is not None)]))


def _ids(settings: Mapping[str, Any]) -> list[int]:
    return list(_flat(settings.get("eos_token_id")))


def _flat(value: Any) -> Iterator[int]:
    """Ids are written as one number or as several."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item >= 0:
            yield item
