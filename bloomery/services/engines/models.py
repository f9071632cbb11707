"""The base models of this server: names from the configuration, sizes from their directories, readiness from their engines."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from sqlalchemy import Connection, delete, insert

from bloomery.config import ModelConfig
from bloomery.models.families import read_config
from bloomery.obs.machine import total_memory_bytes
from bloomery.render import ChatTokenizer
from bloomery.services.access.principal import Principal
from bloomery.services.engines.link import EngineLink
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import InvalidInput, NotFound, blame, shown
from bloomery.types.footprint import full_run_bytes, trained_parts
from bloomery.types.ids import now_us
from bloomery.types.operations import LoraSpec
from bloomery.types.routing import RoutingShape


class ServedBase(NamedTuple):
    """A base under one of its names."""

    alias: str
    base_hash: str
    path: str
    context: int
    vocab_size: int
    ready: bool


class Size(NamedTuple):
    """What bounds token ids and lengths, and how wide the model is."""

    context: int
    vocab_size: int
    width: int
    routing: RoutingShape | None = None
    """Of a mixture of experts."""
    partly_dense: bool = False
    """Whether the mixture has dense MLPs, or experts that every token goes to, beside the others."""


class Models:
    """Finds base models and their tokenizers."""

    def __init__(self, configs: Sequence[ModelConfig], links: Mapping[str, EngineLink]) -> None:
        self._configs = {config.alias: config for config in configs}
        self._links = links
        self._sizes = {config.base_hash: read_size(Path(config.path)) for config in configs}
        self._tokenizers: dict[str, ChatTokenizer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tokenizer in self._tokenizers.values():
            tokenizer.close()

    async def load(self, database: Database) -> None:
        """Read the tokenizers, and make the rows say what this server serves."""
        await asyncio.gather(*(asyncio.to_thread(self.tokenizer, base_hash) for base_hash in self._sizes))
        await database.write(lambda connection: _store(connection, list(self._configs.values())))

    def all(self) -> list[ServedBase]:
        """All names, in the order of the configuration: for the server itself."""
        return [self._base(config) for config in self._configs.values()]

    def list(self, p: Principal) -> list[ServedBase]:
        """The same, for a key that can do something with them."""
        p.require("infer", "read", "train", "deploy")
        return self.all()

    def named(self, name: str) -> ModelConfig | None:
        """What this server was told of the base of this name or hash."""
        return next((config for config in self._configs.values() if name in (config.alias, config.base_hash)), None)

    def resolve(self, name: str) -> ServedBase:
        """The base of this name or hash."""
        if (config := self.named(name)) is not None:
            return self._base(config)
        known = ", ".join(f"`{alias}`" for alias in self._configs)
        ways = "`--model NAME=DIR` adds one when it starts (and `--model bloomery-tiny` beside it keeps the shipped one)"
        raise NotFound(f"unknown base model `{shown(name)}`: this server has {known}; {ways}", field="base_model")

    @property
    def longest_context(self) -> int:
        """The most tokens that any of them reads; 0 where there are none."""
        return max((self.size(base_hash).context for base_hash in self._sizes), default=0)

    def size(self, base_hash: str) -> Size:
        """Context and vocabulary: the engine's word where there is one, else that of the model's directory."""
        link = self._links.get(base_hash)
        if link is not None and link.welcome is not None:
            return self._sizes[base_hash]._replace(context=link.welcome.base.context, vocab_size=link.welcome.base.vocab_size)
        if base_hash not in self._sizes:
            raise NotFound(f"base model {base_hash} is not served: start the server with `--model DIR` of that base", field="base_model")
        return self._sizes[base_hash]

    def check_room(self, base_hash: str, lora: LoraSpec) -> None:
        """Refuse a run of all parameters that this machine can never hold. What is left beside the base model, or on a GPU, its engine knows."""
        config = next(config for config in self._configs.values() if config.base_hash == base_hash)
        welcome = self._links[base_hash].welcome
        if lora.rank or welcome is None or config.device != "cpu":
            return
        trained, whole_bytes = sum(welcome.base.parts.get(part, 0) for part in trained_parts(lora)), total_memory_bytes()
        if (needs := full_run_bytes(trained)) > whole_bytes:
            problem = f"a run that trains {trained} parameters (rank 0) needs {needs} bytes of memory, this machine has {whole_bytes}"
            raise InvalidInput(f"{problem}: train an adapter (rank 1 or more) or fewer parts of the model", field="rank")

    def tokenizer(self, base_hash: str) -> ChatTokenizer:
        """The base's tokenizer and chat template, loaded once."""
        if base_hash not in self._tokenizers:
            self._tokenizers[base_hash] = ChatTokenizer.load(Path(self.resolve(base_hash).path))
        return self._tokenizers[base_hash]

    def _base(self, config: ModelConfig) -> ServedBase:
        size, link = self.size(config.base_hash), self._links[config.base_hash]
        return ServedBase(config.alias, config.base_hash, config.path, size.context, size.vocab_size, link.ready)


def read_size(directory: Path) -> Size:
    """From a model directory's config."""
    with blame(InvalidInput, f"the model directory {directory} cannot be read"):
        config = read_config(directory)
    return Size(config.context, config.vocab_size, config.hidden_size, config.routing, config.partly_dense)


def _store(connection: Connection, configs: Sequence[ModelConfig]) -> None:
    connection.execute(delete(rows.base_model).where(rows.base_model.c.project == rows.DEFAULT_PROJECT))
    for config in configs:
        values = {"alias": config.alias, "base_hash": config.base_hash, "path": config.path, "created_us": now_us()}
        connection.execute(insert(rows.base_model).values(project=rows.DEFAULT_PROJECT, **values))
