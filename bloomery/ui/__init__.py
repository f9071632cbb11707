"""The page at `/`: plain files that read the public API and nothing else."""

from importlib.resources import files
from typing import Final, NamedTuple

_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/chart.js": ("chart.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Asset(NamedTuple):
    """One file of the page."""

    content: bytes
    media_type: str


def assets() -> dict[str, Asset]:
    """Every file by the path it is served at."""
    folder = files(__name__)
    return {path: Asset(folder.joinpath(name).read_bytes(), media_type) for path, (name, media_type) in _FILES.items()}
