"""Schema history: one file per change in `versions`, applied in order when the database is opened."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def migrate(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to the newest version, or to an earlier one, inside the caller's transaction."""
    config = Config()
    # Percent signs mean interpolation to the parser behind Config.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
