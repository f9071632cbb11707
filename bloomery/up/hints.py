"""Commands as messages name them, so that what they say can be typed as it stands."""

import shlex

from bloomery.config.data_dir import DEFAULT_DATA_DIR, DataDir


def command(name: str, data: DataDir) -> str:
    """`bloomery NAME` for this data directory; the default one need not be named."""
    default = data.root == DEFAULT_DATA_DIR.expanduser().resolve()
    return f"bloomery {name}" if default else f"bloomery {name} --data-dir {shlex.quote(str(data.root))}"
