"""A step of GRPO, rollouts, rewards and update, against TRL's GRPOTrainer: `python -m bench.grpo` prints one JSON line.

The same weights, prompts, counts, temperature 1, reward, learning rate and threads, one after the other. The model has no token that ends a text, so
that every completion has all its tokens and a step is the same work for everybody; the reward is one that no two rollouts share, so that none is left
out of the update for having taught nothing.

Ours is `recipes/grpo`: a loop over the public API, on a server of its own. Its steps include what TRL has none of: a journal, a snapshot with its
hash that is proved before it serves, and the client's own time. Two checks that TRL has none of either, and a user has unless he says otherwise, are
off: holding rollouts to what was served (`agreement`), and the distance to the first weights (`kl_rollouts`). It is measured with two servers, of
which one was started with `--plain`; `largest_difference` is what the trainer's log-probabilities were off those that were served, at most. LoRA is
of all layers of the model, which for us, as the recipe has it, include the head; TRL's fused head never trains a factor there, so it has the other
seven.

TRL runs as documented, in float32, and faster than by default: without checkpoints of activations or a reference (`beta` 0), one update a batch, so
that it needs no forward for old log-probabilities, and with rollouts generated in one batch with a cache. Its threads wait as OpenMP does by default,
actively, which was faster here than asleep. It updates in micro-batches of each of the sizes asked for, of which the fastest counts; by default that
is one, of 32 rollouts, which are all of a step.

A step is measured from the end of the one before on both sides, and its rollouts with their rewards; the rest is training.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.line import Line, parser_of
from bench.peers import command, python_of
from bench.shapes import SHAPES, Shape, write_directory
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.recipes import grpo
from bloomery.recipes.grpo import GrpoConfig, StepReport
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.rollouts import Problem, Rollout, RolloutConfig

PEER: Final = Path(__file__).parent / "peers" / "trl_grpo.py"
PEER_SAYS: Final = {
    "peer": "trl 1.16.0 GRPOTrainer, transformers generate with a cache, adamw_torch_fused, no activation checkpoints, beta 0, the best micro-batch",
    "peer_command": command("trl", "bench/peers/trl_grpo.py", "JOB"),
}
FORMS: Final = {"exact": (), "plain": ("--plain",)}
"""Options of our servers."""
RANKS: Final = {"lora": 8, "full": 0}
WARM_UP: Final = 2
"""Steps."""
SLEEPY: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""What would have TRL's threads sleep at barriers."""
FIRST_TOKEN: Final = 5
"""Those below are special ones."""


class Loop(NamedTuple):
    """The steps of one loop behind its first ones: seconds of each, those of its rollouts, and the mean reward."""

    seconds: list[float]
    rollout_seconds: list[float]
    rewards: list[float]


class Ours(NamedTuple):
    """Our loop, and by how much log-probabilities of trainer and sampler were apart in all its steps."""

    loop: Loop
    largest_difference: float


def main() -> None:
    """Measure every size and kind on both."""
    asked = _arguments()
    # Whoever ends this ends the servers: by an exception, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    line = Line("grpo")
    with tempfile.TemporaryDirectory() as place:
        sizes = {size: _size(Path(place) / size, SHAPES[size], asked) for size in asked.sizes}
    names = ("groups", "group_size", "prompt_tokens", "new_tokens", "learning_rate", "steps", "threads", "micro_batches")
    setting = {name: getattr(asked, name) for name in names} | {"warm_up": WARM_UP, "rank": RANKS["lora"], "device": "cpu", "dtype": "float32"}
    line.tell({"setting": setting, **PEER_SAYS, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["5M", "30M"])
    parser.add_argument("--kinds", nargs="+", choices=list(RANKS), default=list(RANKS))
    for name, value in (("groups", 4), ("group-size", 8), ("prompt-tokens", 64), ("new-tokens", 64), ("steps", 8), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[32], help="rollouts that TRL updates with at a time")
    asked = parser.parse_args()
    if any((asked.groups * asked.group_size) % size for size in asked.micro_batches):
        parser.error(f"--micro-batches must divide the {asked.groups * asked.group_size} rollouts of a step")
    return asked


def _size(place: Path, shape: Shape, asked: argparse.Namespace) -> dict[str, Any]:
    model, prompts = endless(shape, place / "model"), prompts_of(shape.vocab_size, asked)
    found: dict[str, dict[str, Any]] = {kind: {"trl": _best_of_trl(model, prompts, kind, place, asked)} for kind in asked.kinds}
    for form, options in FORMS.items():
        server_options = ("--threads", str(asked.threads), "--replicas", "0", *options)
        with serving(str(model), keep=False, options=server_options) as server, Client(server.url, server.key) as client:
            if all(engine.detail["bit_exact"] for engine in client.status().engines) != (form == "exact"):
                raise SystemExit(f"this machine cannot run this benchmark: its {form} server is {'not ' * (form == 'exact')}bit-exact")
            for kind in asked.kinds:
                loop, difference = ours(client, prompts, RANKS[kind], place / f"{kind}-{form}.json", asked)
                found[kind][form] = shown(loop, asked) | {"largest_difference": difference}
    return {kind: each | _ratios(each) for kind, each in found.items()}


def endless(shape: Shape, place: Path) -> Path:
    """A model without a token that ends a text."""
    model = write_directory(shape, place)
    for name, keys in (
        ("config.json", ["eos_token_id"]),
        ("generation_config.json", ["eos_token_id"]),
        ("tokenizer_config.json", ["eos_token", "chat_template"]),
    ):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(settings | dict.fromkeys(keys)))
    return model


def prompts_of(vocab_size: int, asked: argparse.Namespace) -> list[list[int]]:
    """One for each group of all steps: nobody sees one twice."""
    size = ((WARM_UP + asked.steps) * asked.groups, asked.prompt_tokens)
    prompts: list[list[int]] = np.random.default_rng(0).integers(FIRST_TOKEN, vocab_size, size).tolist()
    return prompts


def _best_of_trl(model: Path, prompts: Sequence[list[int]], kind: str, place: Path, asked: argparse.Namespace) -> dict[str, Any]:
    job = {"model": str(model), "out": str(place / "trl"), "prompts": prompts, "steps": WARM_UP + asked.steps, "groups": asked.groups}
    job |= {"group_size": asked.group_size, "max_tokens": asked.new_tokens, "learning_rate": asked.learning_rate}
    job |= {"rank": RANKS[kind], "threads": asked.threads, "seed": 0}
    file, tried = place / "job.json", {}
    for micro_batch in asked.micro_batches:
        file.write_text(json.dumps(job | {"micro_batch": micro_batch}))
        argv = [python_of("trl"), PEER, file]
        environment = {name: value for name, value in os.environ.items() if name not in SLEEPY} | {"HF_HUB_OFFLINE": "1"}
        printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        found = json.loads(printed.splitlines()[-1])
        tried[micro_batch] = shown(Loop(*(found[name][WARM_UP:] for name in Loop._fields)), asked)
    best = min(tried, key=lambda micro_batch: tried[micro_batch]["step_s"])
    return tried[best] | {"micro_batch": best}


def ours(client: Client, prompts: Sequence[list[int]], rank: int, cursor: Path, asked: argparse.Namespace) -> Ours:
    """The recipe's loop on a server; every rollout has all its tokens, or there is no figure."""
    (model,) = client.models()
    problems = [Problem(str(number), tuple(prompt)) for number, prompt in enumerate(prompts)]
    ends, reports = [time.perf_counter()], []

    def note(report: StepReport) -> None:
        ends.append(time.perf_counter())
        reports.append(report.metrics)

    # The peer neither holds rollouts to what was served nor measures how far the policy has gone.
    policy = PolicyConfig(base_model=model.alias, rank=rank, learning_rate=asked.learning_rate, agreement="off")
    rollouts = RolloutConfig(group_size=asked.group_size, max_tokens=asked.new_tokens)
    config = GrpoConfig(policy=policy, rollouts=rollouts, groups_per_step=asked.groups, concurrency=asked.groups, kl_rollouts=0)
    grpo.train(client, problems, mean_id, config, cursor, steps=WARM_UP + asked.steps, on_step=note)
    if any((each["rollouts/length"], each["groups/trained"]) != (asked.new_tokens, asked.groups) for each in reports):
        raise SystemExit("a rollout ended before its length, or a group was left out: steps are not the same work")
    seconds = [end - began for began, end in pairwise(ends)]
    columns = ([each[name] for each in reports] for name in ("seconds/rollouts", "reward/raw"))
    loop = Loop(*(column[WARM_UP:] for column in (seconds, *columns)))
    return Ours(loop, max(each["ratio/largest_difference"] for each in reports))


def mean_id(rollout: Rollout) -> float:
    """A reward that TRL's script has too."""
    return statistics.fmean(rollout.tokens)


def shown(loop: Loop, asked: argparse.Namespace) -> dict[str, Any]:
    """Medians; tokens are those that were sampled, and those that the update went through with their prompts."""
    rest = [whole - rollouts for whole, rollouts in zip(loop.seconds, loop.rollout_seconds, strict=True)]
    step_s, rollouts_s, training_s = (statistics.median(column) for column in (loop.seconds, loop.rollout_seconds, rest))
    members = asked.groups * asked.group_size
    return {
        "step_s": round(step_s, 3),
        "fastest_and_slowest_s": [round(min(loop.seconds), 3), round(max(loop.seconds), 3)],
        "rollouts_s": round(rollouts_s, 3),
        "training_s": round(training_s, 3),
        "sampled_tokens_per_s": round(members * asked.new_tokens / step_s),
        "of_rollouts_tokens_per_s": round(members * asked.new_tokens / rollouts_s),
        "of_training_tokens_per_s": round(members * (asked.prompt_tokens + asked.new_tokens) / training_s),
        "reward_of_last_steps": round(statistics.fmean(loop.rewards), 1),
    }


def _ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times as long TRL took."""
    parts = (("ratio", "step_s"), ("rollouts_ratio", "rollouts_s"), ("training_ratio", "training_s"))
    return {f"{form}_{name}": round(found["trl"][part] / found[form][part], 2) for form in FORMS for name, part in parts}


if __name__ == "__main__":
    main()
