"""An agent of several turns that learns, over some seeds: `python -m bench.lookups` prints one JSON line.

The program of the worked example (`recipes/learn_lookups`) runs for each seed, as it is, on a server of its own. `seeds` has what each found: the
reward of problems that nobody trained on, with 95 % intervals over these, of the model that ships (`before`), behind the supervised warm start
(`warm`) and at the end (`after`), and the mean reward of the rollouts of every step. `held_out` and `step_rewards` are means over the seeds, with
95 % intervals over them (Student's t) where there are several. A smaller `--held-out`, `--examples` or `--steps` shows that it runs, and no more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.line import Line, parser_of
from bench.rl_chart import mean
from bloomery.cli.demo_server import serving

MODEL: Final = "bloomery-tiny"
MEASURED: Final = ("before", "warm", "after")
PASSED_ON: Final = ("steps", "examples", "held_out", "learning_rate")
"""Settings that are options of the program too."""


class Learnt(NamedTuple):
    """What one seed did."""

    seed: int
    held_out: dict[str, dict[str, Any]]
    """Of each of `MEASURED`."""
    step_rewards: list[float]
    seconds: float
    """Of all steps."""
    lost: float
    """Rollouts of all steps and measurements."""
    largest_k3: float | None
    """Of all steps: 0 where trainer and sampler agree to the bit. None where no step had anything to learn from."""


def main() -> None:
    """Learn with every seed, one after the other."""
    asked = _arguments()
    line = Line("lookups")
    found = [_on_a_server(seed, asked) for seed in asked.seeds]
    setting = {name: getattr(asked, name) for name in ("threads", *PASSED_ON)}
    line.tell({"model": MODEL, "setting": setting, **shown(found)})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of the server's engine")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--examples", type=int, default=384, help="worked ones, of the warm start")
    parser.add_argument("--held-out", type=int, default=48, help="problems that nobody trains on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def _on_a_server(seed: int, asked: argparse.Namespace) -> Learnt:
    options = ("--threads", str(asked.threads), "--replicas", "0")
    with serving(MODEL, keep=False, options=options) as server, tempfile.TemporaryDirectory() as place:
        return learn(server.url, server.key, seed, Path(place) / "cursor", asked)


def learn(url: str, key: str, seed: int, cursor: Path, asked: argparse.Namespace) -> Learnt:
    """Run the program on a server."""
    passed_on = [word for name in PASSED_ON for word in (f"--{name.replace('_', '-')}", str(getattr(asked, name)))]
    argv = [sys.executable, "-m", "bloomery.recipes.learn_lookups", "--url", url, "--base-model", MODEL, "--cursor", str(cursor), "--seed", str(seed)]
    environment = {**os.environ, "BLOOMERY_API_KEY": key}
    done = subprocess.run([*argv, *passed_on], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    measured = {row["kind"]: row for row in rows if row["kind"] in MEASURED}
    return Learnt(
        seed=seed,
        held_out={kind: {"reward": row["reward"], "interval": [row["low"], row["high"]]} for kind, row in measured.items()},
        step_rewards=[row["reward/raw"] for row in steps],
        seconds=round(measured["after"]["seconds"], 1),
        lost=sum(row["failures/lost"] for row in steps) + sum(row["lost"] for row in measured.values()),
        largest_k3=max((row["ratio/k3"] for row in steps if "ratio/k3" in row), default=None),
    )


def shown(found: Sequence[Learnt]) -> dict[str, Any]:
    """By seed, and of all of them."""
    held_out = {kind: _over_seeds([each.held_out[kind]["reward"] for each in found]) for kind in MEASURED}
    steps = [_over_seeds(rewards) for rewards in zip(*(each.step_rewards for each in found), strict=True)]
    return {"held_out": held_out, "step_rewards": steps, "seeds": [each._asdict() for each in found]}


def _over_seeds(rewards: Sequence[float]) -> dict[str, Any]:
    if len(rewards) < 2:
        return {"reward": round(statistics.fmean(rewards), 4)}
    value, low, high = mean(rewards)
    return {"reward": round(value, 4), "interval": [round(low, 4), round(high, 4)]}


if __name__ == "__main__":
    main()
