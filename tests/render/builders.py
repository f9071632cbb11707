"""Small tokenizers of the two kinds in use, and model directories around them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n\nsystem user assistant\n",
    "You are a helpful assistant. What is 12 times 3? It is 36.\n",
    'Ein Gruß aus Köln: naïve café, 東京 and 🔥. {"name": "add", "arguments": [1, 2]}\n',
)
CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def byte_level(special: tuple[str, ...] = CHATML_SPECIAL) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if "<|begin_of_text|>" in special:
        first = ("<|begin_of_text|>", special.index("<|begin_of_text|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[first])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """As tokenizers that came from sentencepiece have it: unknown characters as bytes, a mark for spaces."""
    pieces = sorted({character for text in TEXTS for character in text if character.isascii() and character.isprintable()} - {" "})
    words = ["\u2581", "\u2581The", "he", "\u2581a", "is"]
    vocab = [*MISTRAL_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *words, "T"]
    merges = [("h", "e"), ("\u2581T", "he"), ("\u2581", "a"), ("i", "s"), ("\u2581", "T")]
    numbered = {piece: number for number, piece in enumerate(dict.fromkeys([*vocab, "\u2581T"]))}
    tokenizer = Tokenizer(models.BPE(numbered, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MISTRAL_SPECIAL])
    return tokenizer


def small_config(vocab_size: int, context: int = 2048) -> dict[str, Any]:
    """The `config.json` of a model that nobody computes with."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": "qwen3", "vocab_size": vocab_size, "max_position_embeddings": context, **sizes}


def write(directory: Path, tokenizer: Tokenizer | None, **files: Any) -> Path:
    """A model directory with this tokenizer; every other file is given by its name, `.json` where it is an object."""
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (directory / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def chatml_directory(directory: Path, template: str | None = CHATML) -> Path:
    """ChatML, or another template over the same tokens."""
    return write(directory, byte_level(), tokenizer_config={"eos_token": "<|im_end|>", **({} if template is None else {"chat_template": template})})
