"""Immutable weights by any of their names: a base model's alias or hash, a snapshot's version, a `tinker://` sampler path."""

from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, or_, select

from bloomery.services.access.principal import Principal
from bloomery.services.engines.models import Models
from bloomery.services.kinds import SNAPSHOT
from bloomery.services.listeners import Listeners
from bloomery.services.training.checkpoints import FOLDERS, PATH, of_run, readable
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import InvalidInput, NotFound, shown
from bloomery.types.generation import Weights

_TINKER: Final = "tinker://"
_PATH_CHARS: Final = 256
_NAMED: Final = 20
"""Deployments that an error names."""


class Version(NamedTuple):
    """Weights, and the base they belong to."""

    weights: Weights
    base_hash: str
    base_model: str


class Versions:
    """Looks weights up."""

    def __init__(self, database: Database, models: Models) -> None:
        self.published = Listeners()
        """When a run published weights, and their row is there."""
        self._database = database
        self._models = models

    async def find(self, p: Principal, name: str) -> Version:
        """The weights behind a name; NotFound says which names there are. Sampling with them takes a scope of its own."""
        p.require("infer", "read", "train", "deploy")
        found = self._of_base(name) or await self._database.read(lambda connection: _snapshot(connection, p.project, name))
        if found is None:
            raise await self.unknown(p.project, name)
        return found

    def look(self, connection: Connection, project: str, name: str) -> Version | None:
        """The same for who has asked for the scope, and asks the database for more than that; None where they are `unknown`."""
        return self._of_base(name) or _snapshot(connection, project, name)

    async def stays(self, version: Version) -> bool:
        """Whether it is there until somebody deletes it."""
        return await self._database.read(lambda connection: version_lasts(connection, version.weights.version))

    async def unknown(self, project: str, name: str) -> NotFound:
        """That nothing has this name, and which names there are."""
        return NotFound(await self._names(project, name), field="model")

    def _of_base(self, name: str) -> Version | None:
        base = self._models.named(name)
        return None if base is None else Version(Weights(version=base.base_hash), base.base_hash, base.alias)

    async def _names(self, project: str, name: str) -> str:
        if name.startswith(_TINKER):
            path = shown(name, _PATH_CHARS)
            return f"there are no weights `{path}`: they were never saved, were deleted, expired, or are another project's and not published"
        query = select(rows.deployment.c.name).where(rows.deployment.c.project == project).order_by(rows.deployment.c.name).limit(_NAMED)
        deployed = await self._database.read(lambda connection: list(connection.scalars(query)))
        known = ", ".join(f"`{known}`" for known in [*(base.alias for base in self._models.all()), *deployed])
        return (
            f"no model `{shown(name)}`: there are {known}, and snapshots by their version or `tinker://` path; one without a name goes after a while"
        )


def version_lasts(connection: Connection, version: str) -> bool:
    """Whether weights are there until somebody deletes them: of a base model, or some row of them never expires, and has a name or is held by a
    deployment."""
    table = rows.checkpoint.c
    deployed = select(rows.revision.c.id).where(rows.revision.c.key == table.key).exists()
    lasting = (table.expires_us.is_(None), or_(table.name.is_not(None), deployed))
    saved = select(table.id).where(table.kind == SNAPSHOT, table.version == version, *lasting)
    base = select(rows.base_model.c.alias).where(rows.base_model.c.base_hash == version)
    return any(connection.execute(query.limit(1)).first() is not None for query in (base, saved))


def _snapshots() -> Select[str, str, str, str]:
    table = rows.checkpoint.c
    columns = (table.version, table.key, rows.run.c.base_hash, rows.run.c.base_model)
    joined = rows.checkpoint.join(rows.run, table.run_id == rows.run.c.id)
    return select(*columns).select_from(joined).where(table.kind == SNAPSHOT)


def _snapshot(connection: Connection, project: str, name: str) -> Version | None:
    condition = _at_path(name) if name.startswith(_TINKER) else rows.checkpoint.c.version == name
    query = _snapshots().where(readable(project), condition).order_by(rows.checkpoint.c.created_us.desc()).limit(1)
    row = connection.execute(query).first()
    return None if row is None else Version(Weights(version=row.version, key=row.key), row.base_hash, row.base_model)


def _at_path(path: str) -> ColumnElement[bool]:
    parts = PATH.fullmatch(path)
    if parts is None:
        raise InvalidInput(f"`{path}` is no path of weights: `tinker://<run>/sampler_weights/<name>`", field="model")
    if parts["folder"] != FOLDERS[SNAPSHOT]:
        raise InvalidInput(f"`{path}` is not for sampling: save weights for the sampler and use their `sampler_weights` path", field="model")
    return (rows.checkpoint.c.name == parts["name"]) & of_run(parts["run"])
