"""What each process is told when it starts: frozen dataclasses, JSON on disk, written by the supervisor and read once by the child.

`data_dir` names the files of a data directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from bloomery.types.errors import InvalidInput
from bloomery.types.protocol import Role
from bloomery.types.resources import Price

RecordMode = Literal["off", "metadata", "full"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_PORT: Final = 8700
DEFAULT_MAX_WAITING: Final = 1024
DEFAULT_JOBS: Final = 2
DEFAULT_KEEP_ROLLOUTS: Final = 200
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
class EndpointConfig(_FromJson):
    """Models elsewhere, behind a server that speaks OpenAI's contract. Of its key this says where it is, and never the key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$", max_length=2048)]
    """It ends where `/chat/completions` begins."""
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """The variable of the environment that holds the key."""
    key_file: Annotated[str, Field(min_length=1)] | None = None
    """Or the file."""
    models: dict[Annotated[str, Field(min_length=1, max_length=256)], Price | None] | None = None
    """Those that may be asked, with their prices; None: any."""
    projects: tuple[str, ...] = ("default",)
    """Whose keys may ask them."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Of one answer."""
    concurrency: Annotated[int, Field(ge=1, le=100)] = 8
    """Questions at a time."""

    def key(self, environment: Mapping[str, str]) -> str | None:
        """The key, read now; None where the endpoint wants none. InvalidInput says where it should have been."""
        if self.key_env is not None and self.key_file is not None:
            raise InvalidInput(f"endpoint `{self.name}` has both `key_env` and `key_file`: its key is in one of them", field="key_file")
        if self.key_env is not None:
            found, place = environment.get(self.key_env, ""), f"the variable {self.key_env}"
        elif self.key_file is not None:
            place = f"the file {self.key_file}"
            try:
                found = Path(self.key_file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidInput(
                    f"the key of endpoint `{self.name}` cannot be read from {place}: {type(error).__name__}", field="key_file"
                ) from None
        else:
            return None
        key = found.strip()
        # What is no header would be told by the client that sends it, with the key in its words.
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidInput(
                f"{place} holds no key for endpoint `{self.name}`: set it, in one line", field="key_env" if self.key_env else "key_file"
            )
        return key


GraderLevel = Literal["L1", "L2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig(_FromJson):
    """An agent of many turns, behind a server that takes Eval Protocol's remote rollouts, whose answers jobs of reinforcement train."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    url: Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$", max_length=2048)]
    """It ends where `/init` begins."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Where its server says how rollouts ended, while a job has it."""
    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """The address of this machine at which that server reaches the job: there, and at a port of its own for the model."""
    projects: tuple[str, ...] = ("default",)
    """Whose jobs may have it."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Of one rollout."""


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
    keep_rollouts: int = DEFAULT_KEEP_ROLLOUTS
    """Of the newest steps of each run; 0: none are recorded."""
    endpoints: tuple[EndpointConfig, ...] = ()
    """Models elsewhere that graders and evaluations may ask."""
    agents: tuple[AgentConfig, ...] = ()
    """Agents elsewhere that jobs of reinforcement may train."""
    graders: GraderLevel = "L1"
    """Where code of graders runs: in a jail, or in one within a container."""
    public_hosts: tuple[str, ...] = ()
    """Names, in small letters, under which browsers may ask for this server, beside its addresses and the name of its machine."""
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


TrackerKind = Literal["mlflow", "tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerConfig(_FromJson):
    """Where what jobs measure goes, too."""

    kind: TrackerKind
    target: str
    """A directory of event files, the URI of an MLflow server or store, or a project of Weights & Biases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsConfig(_FromJson):
    """The runner of jobs: a client of the api at `url`, with the development key."""

    data_dir: str
    url: str
    name: str
    slots: int
    """Jobs that run at a time."""
    trackers: tuple[TrackerConfig, ...] = ()
    log_level: LogLevel = DEFAULT_LOG_LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig(_FromJson):
    """The process that tells a tracker what jobs measure: a client of the api at `url`, with the development key."""

    data_dir: str
    url: str
    name: str
    """Of the runner that started it."""
    tracker: TrackerConfig
    log_level: LogLevel = DEFAULT_LOG_LEVEL


def to_json(config: ModelConfig | ApiConfig | EngineConfig | JobsConfig | TrackingConfig) -> str:
    """The text that `from_json` of the same class reads."""
    return TypeAdapter(type(config)).dump_json(config, indent=2).decode()
