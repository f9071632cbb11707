"""The page of before, for as long as its files lie here."""

from pathlib import Path
from typing import Final

from bloomery.ui.asset import Asset

_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/chart.js": ("chart.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}


def assets() -> dict[str, Asset]:
    """Every file by the path it is served at; none where one is gone."""
    folder = Path(__file__).parent
    if not all((folder / name).is_file() for name, _ in _FILES.values()):
        return {}
    return {path: Asset((folder / name).read_bytes(), media_type) for path, (name, media_type) in _FILES.items()}
