"""Pretraining text that is on the machine: documentation of the standard library and of the installed packages, read from source, never imported.

One `Document` is one public definition (signature and docstring) or one module docstring. Whoever calls says which texts must stay out.
"""

import ast
import sysconfig
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

MAX_CHARS = 1600
MIN_CHARS = 40
SKIPPED = frozenset(
    {"test", "tests", "testing", "_vendor", "vendored", "site-packages", "dist-packages", "idlelib", "lib2to3", "tkinter", "distutils"}
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Document(NamedTuple):
    """One piece of documentation with the dotted module it comes from."""

    text: str
    module: str

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]


def read_documents(*, is_protected: Callable[[str], bool]) -> list[Document]:
    """Every distinct document of the standard library and of the installed packages that does not hold a protected text."""
    distinct: dict[str, Document] = {}
    for root in (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))):
        for document in documents_under(root):
            distinct.setdefault(document.text, document)
    return [document for document in distinct.values() if not is_protected(document.text)]


def documents_under(root: Path) -> Iterator[Document]:
    """Documents of every file below a folder, in a fixed order."""
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts):
            module = ".".join(parts).removesuffix(".__init__")
            for text in _texts(file.read_text(encoding="utf-8", errors="replace")):
                yield Document(text, module)


def _texts(source: str) -> Iterator[str]:
    tree = _parse(source)
    if tree is None:
        return
    candidates = [cleandoc(ast.get_docstring(tree) or ""), *_definitions(tree.body, "")]
    yield from (text[:MAX_CHARS].strip() for text in candidates if len(text) >= MIN_CHARS)


def _parse(source: str) -> ast.Module | None:
    # Packages ship templates and code for other Pythons under the same suffix.
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def _definitions(body: list[ast.stmt], outer: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            name = f"{outer}{node.name}"
            yield f"{_signature(name, node)}\n{cleandoc(ast.get_docstring(node) or '')}".strip()
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{node.name}.")


def _signature(name: str, node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})".removesuffix("()")
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {name}({ast.unparse(node.args)})"
