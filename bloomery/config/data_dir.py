"""The files of a data directory: names only, nothing is opened here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT_DATA_DIR: Final = Path("~/.bloomery")


@dataclass(frozen=True, slots=True)
class DataDir:
    """Where everything that survives lies."""

    root: Path

    @property
    def version(self) -> Path:
        """Layout version of the directory: one integer."""
        return self.root / "VERSION"

    @property
    def lock(self) -> Path:
        """Held with flock by the running supervisor and its children; its JSON names the holder."""
        return self.root / "lock"

    @property
    def processes(self) -> Path:
        """JSON, replaced at every change: the children of the running supervisor."""
        return self.root / "processes.json"

    @property
    def api_key(self) -> Path:
        """The development key, mode 0600."""
        return self.root / "api_key"

    @property
    def signing_key(self) -> Path:
        """Signs tokens and download addresses, mode 0600; without it those that are out become invalid."""
        return self.root / "signing_key"

    @property
    def chain_key(self) -> Path:
        """Signs what runs publish to their chains, mode 0600; only there if that was asked for."""
        return self.root / "chain_key"

    @property
    def chain_key_public(self) -> Path:
        """The half of it that readers have, in hexadecimal digits."""
        return self.root / "chain_key.pub"

    @property
    def database(self) -> Path:
        """SQLite, opened by the api alone."""
        return self.root / "bloomery.db"

    @property
    def blobs(self) -> Path:
        """Root of the local object store."""
        return self.root / "blobs"

    @property
    def runs(self) -> Path:
        """One journal directory per training run."""
        return self.root / "runs"

    def in_hand(self, base_hash: str) -> Path:
        """What the engine of a base model is executing; written by that engine alone."""
        return self.root / "engines" / f"{base_hash}.in-hand"

    def tracked(self, tracker: str) -> Path:
        """How far a tracker has been told of each job; written by its follower alone."""
        return self.root / "tracking" / tracker

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.root / "logs"

    def log(self, process: str) -> Path:
        """The log of `supervisor`, `api` or `engine-<alias>`."""
        return self.logs / f"{process}.log"
