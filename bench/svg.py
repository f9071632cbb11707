"""What the charts of `docs/` are made of: text, and a white canvas."""

from collections.abc import Iterable
from xml.sax.saxutils import escape


def text(x: float, y: float, said: str, *, anchor: str = "start", size: int = 11, colour: str = "#333") -> str:
    """Words that begin, end or have their middle at a place, in pixels."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(said)}</text>'


def canvas(width: int, height: int, parts: Iterable[str]) -> str:
    """A whole file of this size, in pixels, with these parts upon each other."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#333">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"
