"""What each process is told when it starts: frozen dataclasses, JSON on disk, written by the supervisor and read once by the child.

`data_dir` names the files of a data directory.
"""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Final, Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bloomery.types.errors import InvalidInput
from bloomery.types.protocol import Role

RecordMode = Literal["off", "metadata", "full"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_PORT: Final = 8700
DEFAULT_MAX_WAITING: Final = 1024
DEFAULT_CHECKPOINT_S: Final = 10.0
DEFAULT_DEVICE: Final = "cpu"
DEFAULT_LOG_LEVEL: Final = "info"


class _FromJson:
    """Unknown keys and wrong types fail: a typo in a config file must not be a silent default."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse what `to_json` wrote."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise InvalidInput(f"{cls.__name__}: `{field}`: {first['msg']}", field=field) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig(_FromJson):
    """A process that only samples: for production traffic, or for rollouts."""

    name: str
    socket: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_FromJson):
    """A base model under one of its names; several names may share `base_hash` and `socket`, and then one engine serves them."""

    alias: str
    path: str
    base_hash: str
    dtype: str
    """torch's name of the compute dtype, such as `float32`."""
    threads: int
    """CPU threads of the engine: part of the numerics id, so it is chosen once and never by load."""
    socket: str
    """Unix socket on which the engine listens."""
    device: str = DEFAULT_DEVICE
    """torch's name of where it is computed with."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """Who serves what is deployed of this base; without any the engine does."""
    rollout_replicas: tuple[ReplicaConfig, ...] = ()
    """Who samples versions that nobody deployed, for training and evaluation; without any the engine does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig(_FromJson):
    """The api process."""

    data_dir: str
    host: str
    port: int
    record: RecordMode
    models: tuple[ModelConfig, ...]
    custom_losses: bool = False
    """Whether losses that callers define are computed here."""
    max_waiting: int = DEFAULT_MAX_WAITING
    """Samples of served requests that may wait for an engine's first token."""
    log_level: LogLevel = DEFAULT_LOG_LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(_FromJson):
    """One engine process, or one replica; a replica's `model` has its own socket and threads."""

    data_dir: str
    model: ModelConfig
    role: Role = "engine"
    plain: bool = False
    """Whether it samples in the plain form: faster, and without the bits that a stream goes on with at another process."""
    checkpoint_s: float = DEFAULT_CHECKPOINT_S
    """Compute of a run after which it gets an automatic checkpoint."""
    checkpoint_bytes: int | None = None
    """Payloads of a run after which it gets one; None for as many bytes as a checkpoint of it has, and at least 64 MiB."""
    log_level: LogLevel = DEFAULT_LOG_LEVEL


def to_json(config: ModelConfig | ApiConfig | EngineConfig) -> str:
    """The text that `from_json` of the same class reads."""
    return json.dumps(asdict(config), indent=2)
