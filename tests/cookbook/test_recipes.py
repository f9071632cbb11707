"""Recipes of the published tinker-cookbook, unmodified and offline, against `bloomery up` with bloomery-tiny under the names that they know.

`sl_loop` teaches the tiny model to answer in the form that the rewards of the others ask for; they begin with what it learned. Rewards are
guesses, so that answers to one question differ in them, which is what their losses are about.
"""

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import httpx
import pytest

from tests.cookbook.setup import CHAT_MODEL, ROOT, SERVED, Place, prepare
from tests.live import LiveServer, running_server, wait_until

pytestmark = pytest.mark.slow

PAGE: Final = ROOT / "docs" / "cookbook.md"
RECIPE_S: Final = 400.0
KILLED_AFTER_ROWS: Final = 12
NOWHERE: Final = "http://127.0.0.1:9"
"""Nothing listens there: what a recipe asks of another host than this one fails at once."""
EXPECTED: Final = re.compile("Could not fetch model pricing|stable_reinforce has no public definition")
"""Warnings that are no fault."""
COMPLAINT: Final = re.compile(r"\[(WARNING|ERROR|CRITICAL)\]")

Row = dict[str, Any]


@dataclass(frozen=True)
class Kitchen:
    """Where recipes run: a place with data, and a server."""

    place: Place
    server: LiveServer

    def start(self, recipe: str, log: str, *options: str) -> "subprocess.Popen[bytes]":
        """Begin it as its user would, in the folder with the data."""
        command = [str(self.place.python), "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", *options]
        with (self.place.folder / f"{log}.out").open("ab") as said:
            return subprocess.Popen(command, cwd=self.place.folder, env=self.environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def environment(self) -> dict[str, str]:
        """All that a recipe is told by its surroundings."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.place.folder.parent),
            "TINKER_BASE_URL": self.server.url,
            "TINKER_API_KEY": self.server.key,
            "HF_HUB_OFFLINE": "1",
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, recipe: str, log: str, *options: str) -> list[Row]:
        """Run it to its end; what it measured, step by step."""
        process = self.start(recipe, log, *options)
        try:
            status = process.wait(RECIPE_S)
        finally:
            process.kill()
            process.wait()
        said = (self.place.folder / f"{log}.out").read_text(errors="replace")
        assert status == 0, f"{said[-8000:]}\n{self.server.logs()}"
        assert [line for line in self.read(log, "logs.log") if COMPLAINT.search(line) and not EXPECTED.search(line)] == []
        return self.rows(log, "metrics.jsonl")

    def rows(self, log: str, file: str) -> list[Row]:
        """What a recipe wrote so far, without a line that it is writing."""
        return [json.loads(line) for line in self.read(log, file) if line.endswith("\n")]

    def read(self, log: str, file: str) -> list[str]:
        path = self.place.folder / log / file
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    def listed(self, run: str) -> dict[str, Row]:
        """The checkpoints of a run by path, as the server tells everyone who asks."""
        answer = httpx.get(f"{self.server.url}/api/v1/training_runs/{run}/checkpoints", headers={"x-api-key": self.server.key})
        return {checkpoint["tinker_path"]: checkpoint for checkpoint in answer.raise_for_status().json()["checkpoints"]}


@dataclass(frozen=True)
class Taught:
    """`sl_loop`, killed in the middle and started again."""

    first_life: list[Row]
    """What it measured before it was killed."""
    second_life: list[Row]
    """From its last checkpoint to the end."""
    state_path: str


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    place = prepare(tmp_path_factory.mktemp("home") / "kitchen")
    with running_server(tmp_path_factory.mktemp("server") / "data", *SERVED) as server:
        yield Kitchen(place, server)


@pytest.fixture(scope="module")
def taught(kitchen: Kitchen) -> Taught:
    options = ("batch_size=8", "save_every=10", "learning_rate=4e-3")
    process = kitchen.start("sl_loop", "sl_loop", *options)
    try:
        wait_until(lambda: len(kitchen.rows("sl_loop", "metrics.jsonl")) >= KILLED_AFTER_ROWS or process.poll() is not None, RECIPE_S)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    first_life = kitchen.rows("sl_loop", "metrics.jsonl")
    both = kitchen.run("sl_loop", "sl_loop", *options)
    return Taught(first_life, both[len(first_life) :], kitchen.rows("sl_loop", "checkpoints.jsonl")[-1]["state_path"])


def test_sl_loop_learns(taught: Taught) -> None:
    losses = [row["train_mean_nll"] for row in (*taught.first_life[:10], *taught.second_life)]
    assert len(losses) == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.1 * losses[0]


def test_sl_loop_goes_on_after_a_kill_as_if_nothing_had_happened(taught: Taught) -> None:
    repeated = taught.first_life[10:]
    assert len(repeated) >= 2
    for before, after in zip(repeated, taught.second_life, strict=False):
        for name in ("step", "train_mean_nll", "grad_norm", "learning_rate"):
            assert before[name] == after[name]


def test_the_steps_of_a_recipe_keep_their_numbers(taught: Taught) -> None:
    assert [row["step"] for row in taught.second_life] == list(range(10, 20))


def test_sl_basic_learns_and_evaluates(kitchen: Kitchen) -> None:
    rows = kitchen.run("sl_basic", "sl_basic", "num_epochs=2", "max_steps=2")
    assert rows[1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    assert math.isfinite(rows[0]["test/nll"])
    check_checkpoints(kitchen, "sl_basic")


@pytest.mark.parametrize("loss", ["stable_reinforce", "importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains(kitchen: Kitchen, taught: Taught, loss: str) -> None:
    log = f"rl_loop_{loss}"
    begin_with(kitchen, log, taught.state_path)
    chosen = () if loss == "stable_reinforce" else (f"loss_fn={loss}",)
    rows = kitchen.run("rl_loop", log, "batch_size=4", "group_size=8", "max_tokens=16", "save_every=1", *chosen)
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["reward/total"] < 1
        assert math.isfinite(row["grad_norm"])
        assert row["grad_norm"] > 0
    check_checkpoints(kitchen, log)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_rl_basic_trains_on_what_the_sampler_sampled(kitchen: Kitchen, taught: Taught, loss: str) -> None:
    log = f"rl_basic_{loss}"
    row = kitchen.run("rl_basic", log, "max_tokens=16", f"load_checkpoint_path={taught.state_path}", f"loss_fn={loss}")[0]
    assert row["env/all/total_episodes"] == 8 * 16
    assert row["env/all/format"] > 0.5
    assert 0 < row["env/all/correct"] < 1
    assert row["grad_norm"] > 0
    # The two may only differ where the machine does not give the same bits to both; then by rounding.
    assert abs(row["optim/kl_sample_train_v1"]) < 1e-4
    assert row["optim/kl_sample_train_v2"] < 1e-6
    check_checkpoints(kitchen, log)


def test_dpo_begins_without_a_preference_and_learns_one(kitchen: Kitchen) -> None:
    options = ("dataset=hhh", "batch_size=8", "max_steps=3", "learning_rate=1e-3", "behavior_if_log_dir_exists=raise")
    rows = kitchen.run("preference.dpo.train", "dpo", f"model_name={CHAT_MODEL}", *options)
    assert rows[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert all(after["dpo_loss"] < before["dpo_loss"] for before, after in pairwise(rows))
    assert rows[-1]["accuracy"] == 1.0
    assert math.isfinite(rows[0]["test/nll"])
    check_checkpoints(kitchen, "dpo")


def test_the_commands_of_the_page_run(kitchen: Kitchen) -> None:
    _, block = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    environment = {**kitchen.environment(), "COOKBOOK": str(kitchen.place.python)}
    done = subprocess.run(["bash", "-ec", block], env=environment, capture_output=True, text=True, timeout=RECIPE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith('{"step": ')]) == 4


def test_the_server_had_nothing_to_complain_about(kitchen: Kitchen) -> None:
    lines = [line for file in sorted((kitchen.server.data_dir / "logs").glob("*.log")) for line in file.read_text().splitlines()]
    assert lines
    assert [line for line in lines if not re.match(r"\S+Z INFO ", line)] == []


def begin_with(kitchen: Kitchen, log: str, state_path: str) -> None:
    """Let the recipe find a checkpoint to resume from."""
    folder = kitchen.place.folder / log
    folder.mkdir()
    (folder / "checkpoints.jsonl").write_text(json.dumps({"name": "taught", "batch": 0, "state_path": state_path}) + "\n")


def check_checkpoints(kitchen: Kitchen, log: str) -> None:
    """The server lists every checkpoint that the recipe saved; those on the way expire, the last ones stay."""
    saved = [row for row in kitchen.rows(log, "checkpoints.jsonl") if row["name"] != "taught"]
    run = saved[-1]["state_path"].removeprefix("tinker://").partition("/")[0]
    listed = kitchen.listed(run)
    paths = {row[kind]: row["name"] for row in saved for kind in ("state_path", "sampler_path") if kind in row}
    assert paths.keys() <= listed.keys()
    assert [listed[path]["expires_at"] is None for path in paths] == [name == "final" for name in paths.values()]
