"""Where tasks of `inspect_ai` run: the published package in a virtual environment that sees the project's packages behind its own.

`python -m tests.inspect_ai.setup` writes the logs that the fast tests read again, by the package itself, on a server of its own.
"""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from click.testing import Result
from typer.testing import CliRunner

from bloomery.cli.main import app
from bloomery.client import Client
from tests.cookbook.setup import ROOT, environment
from tests.live import LiveServer, running_server

LOGS: Final = Path(__file__).parent / "logs"
TASK: Final = Path(__file__).parent / "modules.py"
MODEL: Final = "bloomery-tiny"
OTHER: Final = "inspected"
"""A deployment of the same weights."""
GONE: Final = "gone"
_REQUIREMENTS: Final = ROOT / "requirements-inspect-ai.txt"
_READ: Final = ("version", "status", "error", "eval", "results", "reductions", "stats")
_READ_OF_SAMPLES: Final = ("id", "epoch", "target", "scores", "model_usage")


def inspect(server: LiveServer, folder: Path, *arguments: str) -> Result:
    """`bloomery eval inspect` with the package, which keeps nothing outside the folder."""
    python = environment(ROOT / "build" / "inspect-ai", _REQUIREMENTS)
    fixed = ["--python", str(python), "--log-dir", str(folder), "--data-dir", str(server.data_dir)]
    home = {"HOME": str(folder), "XDG_DATA_HOME": str(folder / "share"), "XDG_CACHE_HOME": str(folder / "cache")}
    return CliRunner(env={"COLUMNS": "200", "HF_HUB_OFFLINE": "1", **home}).invoke(app, ["eval", "inspect", f"{TASK}@modules", *fixed, *arguments])


def deploy(server: LiveServer) -> None:
    """Let the model have its second name."""
    with Client(server.url, server.key) as client:
        client.deployments.create(OTHER, MODEL)


def short(log: dict[str, Any]) -> dict[str, Any]:
    """Without what a sample went through."""
    samples = []
    for sample in log["samples"]:
        error = {"error": {"message": sample["error"]["message"]}} if "error" in sample else {}
        samples.append({name: sample[name] for name in _READ_OF_SAMPLES if name in sample} | error)
    return {name: log[name] for name in _READ if name in log} | {"samples": samples}


def _write() -> None:
    with TemporaryDirectory() as place, running_server(Path(place) / "data") as server:
        deploy(server)
        models = [f"--model={name}" for name in (MODEL, OTHER, GONE)]
        done = inspect(server, Path(place) / "logs", *models, "--json", "--", "-T", "temperature=1.0", "-T", "epochs=2")
        for model in json.loads(done.stdout)[0]["models"]:
            log = short(json.loads(Path(model["log"]).read_text()))
            # Where and of what they were made says nothing to their readers.
            log["eval"] |= {"task_file": TASK.name, "revision": None, "model_base_url": None}
            (LOGS / f"{model['model']}.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    _write()
