"""Exported weights to fetch without a key: the files of a version (`exports`), behind addresses that are signed and expire."""

from typing import Final, NamedTuple

from bloomery.services.access.principal import Principal
from bloomery.services.access.tokens import Tokens
from bloomery.services.kinds import EXTERNAL
from bloomery.services.training.checkpoints import CheckpointRow, Checkpoints
from bloomery.services.weights.exports import Exports
from bloomery.services.weights.versions import Version
from bloomery.sync.export import ExportFile
from bloomery.types.errors import NotFound
from bloomery.types.generation import Weights
from bloomery.types.ids import now_us

DOWNLOAD: Final = "download"
LIFETIME_S: Final = 3600


class Offer(NamedTuple):
    """Names of files, and the token that opens each of them until `expires_s`, seconds since the epoch."""

    names: tuple[str, ...]
    token: str
    expires_s: int


class External:
    """Offers exports and opens their files."""

    def __init__(self, checkpoints: Checkpoints, exports: Exports, tokens: Tokens) -> None:
        self._checkpoints, self._exports, self._tokens = checkpoints, exports, tokens

    async def offer(self, p: Principal, run_id: str, name: str) -> Offer:
        """What there is of an export that the caller may read. Whoever gets an address needs no more than that."""
        p.require("read", "train")
        saved = await self._checkpoints.named(p, run_id, EXTERNAL, name)
        expires_s = now_us() // 1_000_000 + LIFETIME_S
        token = self._tokens.sign(DOWNLOAD, {"sub": saved.id}, expires_s=expires_s)
        return Offer(tuple(file.name for file in await self._files(saved)), token, expires_s)

    async def open(self, token: str, name: str) -> ExportFile:
        """One file of an offer."""
        saved = await self._checkpoints.signed(self._tokens.read(DOWNLOAD, token)["sub"])
        for file in await self._files(saved):
            if file.name == name:
                return file
        raise NotFound(f"`{saved.path}` has no file `{name}`", field="name")

    async def _files(self, saved: CheckpointRow) -> tuple[ExportFile, ...]:
        weights = Weights(version=str(saved.version), key=saved.key)
        return (await self._exports.of(Version(weights, saved.base_hash, saved.base_model))).files
