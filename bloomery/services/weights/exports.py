"""Published versions as files that other programs load: an adapter for `peft`, or a whole model for `transformers`.

A whole model is that of a run of all parameters, or (form `merged`) an adapter added to its base model. Files are computed while they are read.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from bloomery.services.access.principal import Principal
from bloomery.services.engines.models import Models
from bloomery.services.weights.deployments import Deployments
from bloomery.services.weights.versions import Version, Versions
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import Verifier
from bloomery.sync.export import ExportFile, adapter, merged
from bloomery.sync.manifest import Kind, Manifest
from bloomery.sync.publish import manifest_key
from bloomery.sync.run_chain import RunChain
from bloomery.types.errors import InvalidInput, NotFound

ExportForm = Literal["adapter", "merged"]
MAX_SHARD_BYTES: Final = 5_000_000_000


class Export(NamedTuple):
    """A version laid out as files."""

    version: str
    kind: Kind
    form: ExportForm
    base_model: str
    base_hash: str
    files: tuple[ExportFile, ...]


class Exports:
    """Lays versions out; every look-up is confined to what the caller may read."""

    def __init__(self, *, blobs: Blobs, versions: Versions, deployments: Deployments, models: Models, trusted: Sequence[Verifier]) -> None:
        """`trusted`: who signs the chains of runs."""
        self._blobs, self._versions, self._deployments, self._models, self._trusted = blobs, versions, deployments, models, trusted

    async def lay_out(self, p: Principal, name: str, form: ExportForm | None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Export:
        """The files of a version, a `tinker://` path, or what a deployment serves now; without a form, that of what was trained."""
        p.require("read", "train")
        live = await self._deployments.live_version(p, name)
        found = live if live is not None else await self._versions.find(p, name)
        if found.weights.key is None:
            raise InvalidInput(f"`{name}` is the base model itself: its files are those that the server was started with", field="version")
        return await asyncio.to_thread(self._lay_out, found, form, max_shard_bytes, self._directory(found))

    async def of(self, found: Version) -> Export:
        """The files of weights that somebody else looked up, in the form that holds what was trained and nothing else; of the base the name alone."""
        return await asyncio.to_thread(self._lay_out, found, None, MAX_SHARD_BYTES, found.base_model)

    async def file(self, p: Principal, name: str, form: ExportForm | None, file: str, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> ExportFile:
        """One of these files."""
        export = await self.lay_out(p, name, form, max_shard_bytes=max_shard_bytes)
        for each in export.files:
            if each.name == file:
                return each
        known = ", ".join(each.name for each in export.files)
        raise NotFound(f"version `{name}` has no file `{file}` in form {export.form}: it has {known}", field="name")

    def _directory(self, found: Version) -> str:
        """Of the base, for an adapter to name what programs on this machine can load; its name where it is not served any more."""
        return next((base.path for base in self._models.all() if base.base_hash == found.base_hash), found.base_model)

    def _lay_out(self, found: Version, form: ExportForm | None, max_shard_bytes: int, base_model: str) -> Export:
        manifest = Manifest.from_json(self._blobs.get(manifest_key(found.weights.version)))
        if not self._blobs.exists(manifest.key):
            # It came by the chain of its run alone. Rows that hold the version hold the blob too.
            chain = RunChain.among(self._blobs.objects, manifest.run_id, trusted=self._trusted)
            self._blobs.put(manifest.key, chain.whole(manifest, self._blobs.directory))
        part = partial(self._blobs.part, manifest.key)
        chosen: ExportForm = form or ("adapter" if manifest.kind == "lora" else "merged")
        if chosen == "adapter":
            files = adapter(manifest, part, base_model)
        else:
            base = Path(self._models.resolve(found.base_hash).path)
            files = merged(manifest, part, base, max_shard_bytes=max_shard_bytes)
        return Export(manifest.version, manifest.kind, chosen, found.base_model, found.base_hash, tuple(files))
