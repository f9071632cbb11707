"""The wheel: it holds all that a server needs, and runs where there is no repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.live import running_server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NEEDED = {
    "bloomery/models/tiny/MODEL_CARD.md",
    "bloomery/models/tiny/weights/config.json",
    "bloomery/models/tiny/weights/model.safetensors",
    "bloomery/models/tiny/weights/tokenizer.json",
    "bloomery/models/tiny/weights/tokenizer_config.json",
    "bloomery/store/migrations/env.py",
    "bloomery/store/migrations/versions/0001_first_schema.py",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(place), str(ROOT)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> dict[str, str]:
    """The environment of a Python that has the wheel and no repository."""
    place = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    where = run("-c", "import bloomery; print(bloomery.__file__)", environment=environment, cwd=wheel.parent)
    assert where == f"{place / 'bloomery' / '__init__.py'}\n"
    return environment


def run(*arguments: str, environment: dict[str, str], cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "bloomery"
    assert held == {str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert held >= NEEDED


def test_commands_run_from_the_wheel_alone(unpacked: dict[str, str], tmp_path: Path) -> None:
    said = run("-m", "bloomery.cli.main", "--help", environment=unpacked, cwd=tmp_path)
    assert all(f" {command} " in said for command in ("up", "demo", "doctor"))
    script = "import sys; from importlib.metadata import entry_points; (script,) = entry_points(group='console_scripts', name='bloomery'); "
    version = run("-c", f"{script} sys.argv[1:] = ['--version']; script.load()()", environment=unpacked, cwd=tmp_path)
    assert version == run("-c", "import bloomery; print(bloomery.__version__)", environment=unpacked, cwd=tmp_path)


def test_a_server_runs_from_the_wheel_alone(unpacked: dict[str, str], tmp_path: Path) -> None:
    with running_server(tmp_path / "data", env=unpacked) as server:
        page = httpx.get(server.url)
        assert (page.status_code, "<title>" in page.text) == (200, True)
        body = {"model": "bloomery-tiny", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-api-key": server.key})
        assert answer.status_code == 200, answer.text
