"""Names of base models that are taken: who asks for a name is answered by the deployment that has it, so a base model of that name had none."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing

from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict, Corrupt, blame
from bloomery.up.base_models import CheckedModel

_DEPLOYMENTS = "SELECT name, project FROM deployment ORDER BY created_us"


def refuse_taken(models: Iterable[CheckedModel], data: DataDir) -> None:
    """Refuse a base model under the name of a deployment, of whatever project. Nothing is changed, and no server may be running."""
    if not data.database.exists():
        return
    with blame(Corrupt, f"{data.database} cannot be read"), closing(sqlite3.connect(f"{data.database.as_uri()}?mode=ro", uri=True)) as database:
        # A server that was killed at its first start left a database without tables.
        has_tables = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'deployment'").fetchone()
        taken = dict(database.execute(_DEPLOYMENTS)) if has_tables else {}
    for model in models:
        if (project := taken.get(model.alias)) is not None:
            problem = f"`{model.alias}` is a deployment of project `{project}`, and a base model of that name could not be asked for"
            raise Conflict(f"{problem}: serve it under another one, with --model OTHER-NAME={model.directory}", field="model")
