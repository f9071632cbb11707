"""What is to be served: names and directories become checked base models, before anything is loaded and without running or unpickling anything."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3
from tokenizers import Tokenizer

from bloomery.models import tiny
from bloomery.models.families import read_config
from bloomery.models.weight_files import check_weights, weight_files
from bloomery.obs.machine import processor_flags, slow_in_bfloat16
from bloomery.types.errors import InvalidInput, NotFound, blame

SHIPPED: Final[Mapping[str, Path]] = {"bloomery-tiny": tiny.PATH}
DEFAULT_MODEL: Final = "bloomery-tiny"

BYTES_PER_PARAMETER: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2}
_SHORT: Final[Mapping[str, str]] = {"float32": "fp32", "bfloat16": "bf16"}
# An engine before it holds anything, what it holds of every token to follow grammars (1.3 kB with 150,000 of them), and what activations, optimizers
# and caches of a few runs add to the weights.
_PROCESS_BYTES: Final = 300_000_000
_BYTES_PER_TOKEN: Final = 1_500
_HEADROOM: Final = 1.25
# The weights once more, as the sampler multiplies them (`infer/packing`).
_PACKED: Final = 1

_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_IDENTITY_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class ModelArgument(NamedTuple):
    """One `--model`: the name it is served under, and its directory."""

    alias: str
    directory: Path


class CheckedModel(NamedTuple):
    """A directory that an engine can serve, as far as its headers tell."""

    alias: str
    directory: Path
    parameters: int
    needs_bytes: int
    """Of an engine."""
    replica_bytes: int
    """Of a replica, which holds nothing but what it multiplies with."""
    process_bytes: int
    """What either has beside weights, in any dtype."""


def model_arguments(values: Sequence[str]) -> tuple[ModelArgument, ...]:
    """Read the values of `--model`; without any, the shipped model."""
    found = [_model_argument(value) for value in values or [DEFAULT_MODEL]]
    taken: dict[str, str] = {}
    for model in found:
        if (other := taken.get(file_name(model.alias))) is not None:
            both = f"two models are called `{other}`" if other == model.alias else f"`{other}` and `{model.alias}` are alike in names of files"
            raise InvalidInput(f"{both}: name one of them with --model other-name=DIR", field="model")
        taken[file_name(model.alias)] = model.alias
    return tuple(found)


def file_name(alias: str) -> str:
    """An alias where it is part of the name of a file or a process."""
    return alias.replace("/", "-")


def check(model: ModelArgument, dtype: str) -> CheckedModel:
    """Make sure that an engine could load it and an api could tokenize for it."""
    with blame(InvalidInput, f"{model.directory / 'config.json'} cannot be used"):
        config = read_config(model.directory)
    with blame(InvalidInput, f"the weights in {model.directory} cannot be used"):
        parameters = check_weights(model.directory, config)
    _check_tokenizer(model.directory, config.vocab_size)
    # A tied head is packed beside the embedding.
    added = config.vocab_size * config.hidden_size if config.tied_head else 0
    process = _PROCESS_BYTES + _BYTES_PER_TOKEN * config.vocab_size
    needs, replica = (
        int(numbers * BYTES_PER_PARAMETER[dtype]) + process for numbers in (parameters * (_HEADROOM + _PACKED), parameters * _HEADROOM + added)
    )
    return CheckedModel(model.alias, model.directory, parameters, needs, replica, process)


def announce(model: CheckedModel, dtype: str, free_bytes: int, *, flags: frozenset[str] | None = None) -> str:
    """The line that says what loading it takes, and whether the processor (the flags of this one, unless given) computes in that dtype."""
    size, needs, free = count(model.parameters), gigabytes(model.needs_bytes), gigabytes(free_bytes)
    slow = (
        ", which this processor has no instructions for: float32 is many times faster"
        if dtype == "bfloat16" and slow_in_bfloat16(flags or processor_flags())
        else ""
    )
    return f"{model.alias}: {size} parameters, {_SHORT[dtype]}{slow}, needs {needs}, {free} free"


def needed_bytes(models: Sequence[CheckedModel], replicas: int) -> int:
    """Of all engines, and so many replicas of each."""
    return sum(model.needs_bytes + replicas * model.replica_bytes for model in models)


def refuse_what_does_not_fit(models: Sequence[CheckedModel], dtype: str, free_bytes: int, *, replicas: int = 0) -> None:
    """All engines and replicas together must fit into memory; one that does not would take the others down with it."""
    needs = needed_bytes(models, replicas)
    if needs > free_bytes:
        names = ", ".join(model.alias for model in models)
        processes = sum(model.process_bytes for model in models) * (1 + replicas)
        smaller = (needs - processes) // 2 + processes
        ways = ["--dtype bfloat16"] if dtype == "float32" and smaller <= free_bytes else []
        if needed_bytes(models, replicas=0) <= free_bytes:
            ways.append("fewer replicas")
        hint = f"use {', '.join(ways)} or a smaller model" if ways else "free memory or use a smaller model"
        raise InvalidInput(f"{names} needs {gigabytes(needs)}, {gigabytes(free_bytes)} free: {hint}", field="model")


def base_hash(directory: Path) -> str:
    """Identity of weights, config, tokenizer and template: blake3 over the hashes of their files by name."""
    files = [directory / name for name in _IDENTITY_FILES if (directory / name).exists()]
    digests = {path.name: _file_hash(path) for path in (*files, *weight_files(directory))}
    return blake3(json.dumps(digests, sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=16)


def count(number: int) -> str:
    """A number of parameters as people say it."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def gigabytes(size: int) -> str:
    """Bytes as gigabytes."""
    return f"{size / 1e9:.1f} GB"


def _model_argument(value: str) -> ModelArgument:
    alias, separator, path = value.partition("=")
    if separator and not _expanded(value).is_dir():
        return ModelArgument(_alias(alias), _directory(path))
    if value in SHIPPED:
        return ModelArgument(value, SHIPPED[value])
    directory = _directory(value)
    return ModelArgument(_alias(directory.name), directory)


def _alias(name: str) -> str:
    if not _ALIAS.fullmatch(name):
        raise InvalidInput(f"`{name}` cannot be a model's name (letters, digits, . _ - /): name it with --model NAME=DIR", field="model")
    return name


def _directory(value: str) -> Path:
    ways = f"give {', '.join(SHIPPED)} or a directory that save_pretrained wrote"
    if not value:
        raise InvalidInput(f"a model without a directory: {ways}", field="model")
    path = SHIPPED.get(value) or _expanded(value)
    if not path.exists():
        raise NotFound(f"unknown model `{value}`: {ways}", field="model")
    if not path.is_dir():
        raise InvalidInput(f"{value} is a file: {ways}", field="model")
    return path.resolve()


def _expanded(value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise NotFound(f"{value} is in the home of a user whom this machine does not know: give the whole path", field="model") from None


def _check_tokenizer(directory: Path, vocab_size: int) -> None:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise InvalidInput(f"{directory} has no tokenizer.json: save the tokenizer into it with tokenizer.save_pretrained(DIR)", field="model")
    with blame(InvalidInput, f"{path} is not a tokenizer"):
        tokenizer = Tokenizer.from_file(str(path))
    if (largest := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) >= vocab_size:
        raise InvalidInput(
            f"{path} has token id {largest}, but config.json says vocab_size {vocab_size}: they are of different models", field="model"
        )


def _file_hash(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()
