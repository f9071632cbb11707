"""The types of the HTTP API for TypeScript: `python -m tests.web.api_types` rewrites them with what `npm ci` installed; `make types` does both."""

import hashlib
import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.api.server import serving

ROOT: Final = Path(__file__).parents[2]
WEB: Final = ROOT / "web"
TYPES: Final = WEB / "src/api.d.ts"
GENERATE_S: Final = 120


def published(directory: Path) -> str:
    """The OpenAPI document that the application answers with, in canonical JSON and without its version, so that a release changes no types."""
    with serving(directory) as server:
        document = server.http.get("/api/v1/openapi.json").json()
    del document["info"]["version"]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def first_line(document: str) -> str:
    """What the types begin with: which document they are made from."""
    digest = hashlib.sha256(document.encode()).hexdigest()
    return f"// Written by `make types` from the OpenAPI document, less its version, with the sha256 {digest}.\n"


def main() -> None:
    with TemporaryDirectory() as scratch:
        source, types = Path(scratch, "openapi.json"), Path(scratch, "api.d.ts")
        document = published(Path(scratch))
        source.write_text(document)
        subprocess.run(["npm", "run", "--silent", "types", "--", str(source), "-o", str(types)], cwd=WEB, timeout=GENERATE_S, check=True)
        TYPES.write_text(first_line(document) + types.read_text())


if __name__ == "__main__":
    main()
