"""The import table of `docs/architecture.md`, held against the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import bloomery

ROOT = Path(bloomery.__file__).parent

SLAB = {"types", "config", "obs"}
MAY_IMPORT = {
    "types": set(),
    "config": {"types"},
    "obs": {"types"},
    "disk": set(),
    "render": {"types"},
    "models": SLAB,
    "sync": SLAB | {"disk", "models"},
    "store": SLAB | {"disk"},
    "grade": SLAB,
    "train": SLAB | {"models"},
    "infer": SLAB | {"models", "sync"},
    "engine": SLAB | {"disk", "models", "train", "infer", "sync", "store"},
    "services": SLAB | {"disk", "store", "render", "grade", "models", "sync"},
    "ui": set(),
    "api": SLAB | {"services", "ui"},
    "client": {"types"},
    "recipes": {"types", "client", "render", "grade"},
    "jobs": SLAB | {"client", "recipes", "render", "grade"},
    "cli": {"types", "config", "obs", "client", "recipes", "render", "jobs"},
}
"""The composition roots `up`, `doctor`, `fidelity` and `sync_files` import anything; only the cli imports them, inside its functions."""
ROOTS = {"up", "doctor", "fidelity", "sync_files"}
SERVICES_MAY_IMPORT = {
    "access": set(),
    "engines": {"access"},
    "training": {"access", "engines"},
    "weights": {"access", "engines", "training"},
    "serving": {"access", "engines", "weights"},
    "clients": {"access", "training", "weights"},
    "grading": {"access", "engines", "weights", "serving"},
    "data": {"access", "engines", "weights"},
    "batches": {"access", "serving", "data"},
    "evaluations": {"access", "engines", "weights", "serving", "grading", "data"},
    "jobs": {"access", "engines", "training", "weights", "grading", "data"},
    "housekeeping": {"access", "training", "clients", "data"},
}
"""Of the packages of `services`, beside themselves and the modules that all of them share; `services.core` composes them and is imported by none."""
EXCEPTIONS = {
    # Keeps the rows that the demo measures on out of the pretraining text.
    ("models.tiny.pretrain", "recipes.stdlib_docs"),
}

TORCH = {"models", "train", "infer", "sync", "engine", "doctor", "fidelity"}
ONLY_IN = {
    "torch": TORCH,
    "safetensors": TORCH,
    "fastapi": {"api"},
    "starlette": {"api"},
    "uvicorn": {"api"},
    "sqlalchemy": {"store", "services"},
    "alembic": {"store"},
    "obstore": {"store"},
    "sqlite3": {"up", "store"},
    "typer": {"cli"},
    "rich": {"cli"},
    "httpx": {"client", "cli", "grade"},
    "sklearn": {"recipes"},
    "llguidance": {"types", "infer"},
    "pyarrow": {"services"},
    "mlflow": {"jobs"},
    "tensorboard": {"jobs"},
    "wandb": {"jobs"},
}
"""Third parties that have a home; the others are welcome everywhere they are declared."""
ONLY_IN_TESTS = {"transformers", "peft", "openai", "tinker", "pytest", "hypothesis"}
PRIVATE_TO_SERVICES = {"store.rows", "store.journal", "store.database", "store.migrations"}


class Import(NamedTuple):
    importer: str
    target: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"bloomery/{self.importer.replace('.', '/')}:{self.line} imports {self.target}"


def package(module: str) -> str:
    return module.partition(".")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in ROOT.rglob("*.py")}


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in _imports(name, ast.parse(path.read_text())))


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    lazy = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, id(node) in lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is a relative import"
            for target in _targets(node):
                yield Import(module, target, node.lineno, id(node) in lazy)


def _targets(node: ast.ImportFrom) -> set[str]:
    """`from bloomery.a import b` imports the module bloomery.a.b if there is one, else bloomery.a."""
    source = node.module or ""
    below = {f"{source}.{alias.name}" for alias in node.names}
    if source.partition(".")[0] != "bloomery":
        return {source}
    return {name if name.removeprefix("bloomery.") in modules() else source for name in below}


def internal() -> Iterator[Import]:
    """Imports of our own modules, their targets without the package's name; `bloomery` itself holds only the version."""
    for found in imports():
        if found.target.startswith("bloomery."):
            yield found._replace(target=found.target.removeprefix("bloomery."))


def test_packages_import_only_what_the_table_allows() -> None:
    wrong = [
        found
        for found in internal()
        if (source := package(found.importer)) not in ROOTS | {package(found.target), ""}
        and package(found.target) not in MAY_IMPORT[source]
        and not (source == "cli" and package(found.target) in ROOTS and found.lazy)
        and (found.importer, found.target) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_every_package_is_in_the_table() -> None:
    assert {package(name) for name in modules()} - {""} <= MAY_IMPORT.keys() | ROOTS


def test_the_page_has_the_same_table() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| (.+) \|$", page.partition("| package | may import, beside itself |")[2].partition("\n\n")[0], re.MULTILINE)
    told = {name: set(re.findall(r"[a-z_]+", allowed)) & MAY_IMPORT.keys() for names, allowed in rows for name in names.split(", ")}
    assert told == MAY_IMPORT


def test_services_know_only_what_stands_before_them() -> None:
    wrong = []
    for found in internal():
        source, target = (name.split(".")[1:] for name in (found.importer, found.target))
        if package(found.importer) != "services" or package(found.target) != "services" or source in ([], ["core"]) or not target:
            continue
        if target[0] in SERVICES_MAY_IMPORT:
            allowed = target[0] == source[0] or target[0] in SERVICES_MAY_IMPORT.get(source[0], ())
        else:
            allowed = target != ["core"]
        wrong += [] if allowed else [found]
    assert not wrong, "\n".join(map(str, wrong))
    assert {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()} == SERVICES_MAY_IMPORT.keys()


def test_rows_and_journals_are_for_services_alone() -> None:
    private = tuple(f"{name}." for name in PRIVATE_TO_SERVICES)
    outside = [found for found in internal() if package(found.importer) not in {"store", "services", "up"}]
    wrong = [found for found in outside if f"{found.target}.".startswith(private)]
    assert not wrong, "\n".join(map(str, wrong))


def test_what_stands_around_the_routes_knows_none_of_them() -> None:
    """Routes import what they share with the layers of the api; only the app puts both together."""
    around = {name for name in modules() if package(name) == "api" and not name.startswith("api.routes")} - {"api.app"}
    wrong = [found for found in internal() if found.importer in around and f"{found.target}.".startswith("api.routes.")]
    assert not wrong, "\n".join(map(str, wrong))


def test_what_bloomery_up_runs_steps_the_sampler_itself() -> None:
    """As docs/serving.md and design note 013 say: the protocol and what stands behind it are a library."""
    library = {f"infer.{name}" for name in ("engine", "embedded", "changes", "revisions", "sampler_thread", "staging")}
    assert library <= modules().keys()
    wrong = [found for found in internal() if found.target in library and found.importer not in library]
    assert not wrong, "\n".join(map(str, wrong))
    assert Import("engine.executor", "infer.sampler", 0, lazy=False) in {found._replace(line=0) for found in internal()}


@pytest.mark.parametrize("third_party", ONLY_IN)
def test_third_parties_stay_in_their_packages(third_party: str) -> None:
    wrong = [found for found in imports() if package(found.target) == third_party and package(found.importer) not in ONLY_IN[third_party]]
    assert not wrong, "\n".join(map(str, wrong))


def test_what_only_tests_depend_on_is_not_imported() -> None:
    wrong = [found for found in imports() if package(found.target) in ONLY_IN_TESTS]
    assert not wrong, "\n".join(map(str, wrong))


def reaches_torch(module: str, seen: set[str]) -> Iterator[str]:
    """Modules that `module` loads, itself included, which import torch when they are loaded."""
    seen.add(module)
    for found in imports():
        if found.importer != module or found.lazy:
            continue
        if package(found.target) == "torch":
            yield str(found)
        own = found.target.removeprefix("bloomery.")
        if found.target.startswith("bloomery.") and own not in seen:
            yield from reaches_torch(own, seen)


@pytest.mark.parametrize("slim", sorted((MAY_IMPORT.keys() | ROOTS) - TORCH | {"doctor"}))
def test_nothing_outside_the_engine_tower_loads_torch(slim: str) -> None:
    wrong = [line for name in modules() if package(name) == slim for line in reaches_torch(name, set())]
    assert not wrong, "\n".join(wrong)


def test_deltas_and_chains_load_no_torch() -> None:
    """Those who have a trainer of their own, or follow a chain, need not have it."""
    wrong = [line for name in modules() if name.startswith(("sync.codec", "sync.chain", "sync.foreign")) for line in reaches_torch(name, set())]
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_top() -> None:
    """Lazy only at the front door: the cli's composition roots, torch where it may be missing or must wait for settings, the api's process,
    for which the garbage collector stands still meanwhile, what changes older tables, slow scikit-learn, extras that sign and compile, and what few
    graders need, for whatever a fork server has loaded makes every fork of it slower."""
    allowed = {
        ("cli", "up"),
        ("cli", "doctor"),
        ("cli", "fidelity"),
        ("cli", "sync_files"),
        ("doctor", "torch"),
        ("doctor", "models"),
        ("api", "api"),
        ("engine", "engine"),
        ("grade", "asyncio"),
        ("grade", "eval_protocol"),
        ("recipes", "sklearn"),
        ("sync", "cryptography"),
        ("sync", "sync"),
        ("up", "store"),
    }
    lazy = [found for found in imports() if found.lazy]
    wrong = [found for found in lazy if (package(found.importer), package(found.target.removeprefix("bloomery."))) not in allowed]
    assert not wrong, "\n".join(map(str, wrong))


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for found in internal():
        if not found.lazy and found.importer != found.target:
            graph[found.importer].add(found.target)
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)
