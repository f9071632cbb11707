"""Through the SDK, against SkyRL tx 0.3.0 on the same machine: `python -m bench.skyrl` trains, with `--sample` it samples; one JSON line.

Each server is driven by the `tinker` SDK that it speaks (SkyRL 0.16.1, Bloomery 0.38.0), one after the other, with the same model, batches and rank.
SkyRL compiles per shape: its first steps and rounds are not counted, and neither are ours.

A step is `forward_backward` and `optim_step`. Tokens per second are those of all steps, from the first submission to the last result. What may be
submitted before a step's results are awaited is measured in three forms, with one driver: nothing, the next step's `forward_backward`, and all steps,
as both SDKs allow. SkyRL takes every waiting `optim_step` at once and then the forwards behind them as one batch, so that almost no step trains when
all are submitted: `trained_steps` counts losses that differ from the one before, and a form in which some do not has no figure. The ratio is of each
side's fastest form. Even there SkyRL waits for looks at its database; `at_least` is the ratio to what its engine's log says of the computing alone,
while ours pays for everything. Ours is measured twice: plain (cross_entropy), and bit-exact, with a loss whose forward has the sampler's bits
(importance_sampling).

A round of `--sample` is all samples of all prompts, from submission to the last result, with the weights of a run that has not stepped. Ours is
measured with two servers, of which one was started with `--plain`. SkyRL looks for a finished result at times that are further and further apart, so
its tokens per second come in steps; `at_least` are the ratios if its results had been there right after the look before the one that found them.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate, count, pairwise, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import Qwen3Config

from bench.line import Line, parser_of
from bench.peers import command, python_of
from bench.shapes import Shape, write_directory
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.obs.machine import usable_cpus

DRIVERS: Final = Path(__file__).parent / "peers"
SETTINGS: Final = {
    "4x256": (Shape(4096, 256, 4, 4, 2, 768), 8, 128),
    "8x512": (Shape(4096, 512, 8, 8, 4, 1536), 4, 256),
}
"""Shape, sequences, tokens of each."""
WARM_UP: Final = 3
"""Steps."""
AHEAD: Final = ("nothing", "forward", "all")
"""SkyRL loses its steps in the last, and may compile for its batch: nothing is measured behind it."""
WARM_UP_ROUNDS: Final = 5
"""SkyRL may take the requests of one round in one batch or in two, and compiles both."""
FIRST_LOOK_S: Final = 0.1
LONGEST_LOOK_S: Final = 1.0
"""How long SkyRL waits before it looks for a result again: one and a half times as long each time, up to this."""
PEER_BACKEND: Final = '{"max_lora_adapters":2,"max_lora_rank":8}'
"""As little as the run needs, beside the one adapter that it keeps for the base: it computes with all ranks of all of them."""
COMPUTED: Final = re.compile(r"\(forward_backward, n=1\) took ([\d.]+)s.*?\(timing\) process_single_request\(optim_step\) took ([\d.]+)s", re.DOTALL)
START_S: Final = 300.0


class Peer(NamedTuple):
    """A SkyRL that answers."""

    url: str
    model: str
    log: Path


def main() -> None:
    """Measure both models on both servers."""
    asked = _arguments()
    # Whoever ends this ends the servers: by an exception, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    measure = _sampling if asked.sample else _training
    line = Line("skyrl_sampling" if asked.sample else "skyrl")
    with tempfile.TemporaryDirectory() as place:
        sizes = {name: measure(Path(place) / name, name, asked) for name in asked.sizes}
    setting = {"rank": 8, "threads": usable_cpus(), "device": "cpu", "dtype": asked.dtype, "peer": f"skyrl-tx 0.3.0, backend {PEER_BACKEND}"}
    setting["peer_command"] = command("skyrl", *_server_arguments("PORT", "MODEL", "PLACE"))
    if asked.sample:
        counts = {name: getattr(asked, name) for name in ("prompts", "prompt_tokens", "samples", "new_tokens", "rounds")}
        line.tell({**setting, **counts, **sizes})
    else:
        line.tell({**setting, "steps": asked.steps, **sizes})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model's file, and what both servers compute in")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sample", action="store_true", help="sample instead of training")
    for name, value in (("prompts", 2), ("prompt-tokens", 32), ("samples", 8), ("new-tokens", 64), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _sampling(place: Path, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    model = write_directory(SETTINGS[name][0], place / "model", getattr(torch, asked.dtype))
    seconds, exact, apart = {}, {}, {}
    with _skyrl(_for_transformers_4(model, place / "peer-model")) as peer:
        seconds["skyrl"] = _median_round_s(python_of("tinker-0.16"), peer.url, "tml-none", peer.model, asked)
    for form, options in (("exact", ()), ("plain", ("--plain",))):
        threads = ("--threads", str(usable_cpus()), "--replicas", "0")
        with serving(str(model), keep=False, dtype=asked.dtype, options=(*threads, *options)) as server:
            seconds[form] = _median_round_s(Path(sys.executable), server.url, server.key, "model", asked)
            with Client(server.url, server.key) as client:
                engines = [engine.detail for engine in client.status().engines]
            exact[form] = all(engine["bit_exact"] for engine in engines)
            apart[form] = [engine["proved"]["probe_max_abs"] for engine in engines]
    tokens = asked.prompts * asked.samples * asked.new_tokens
    return {
        "tokens_per_s": {form: round(tokens / each) for form, each in seconds.items()},
        "round_ms": {form: round(1000 * each, 1) for form, each in seconds.items()},
        "bit_exact": exact,
        "probe_max_abs": apart,
        "exact_ratio": round(seconds["skyrl"] / seconds["exact"], 2),
        "plain_ratio": round(seconds["skyrl"] / seconds["plain"], 2),
        "at_least": {form: round(_earliest_s(seconds["skyrl"]) / seconds[form], 2) for form in ("exact", "plain")},
    }


def _median_round_s(python: Path, url: str, key: str, model: str, asked: argparse.Namespace) -> float:
    counts = (asked.prompts, asked.prompt_tokens, asked.samples, asked.new_tokens, asked.rounds + WARM_UP_ROUNDS)
    seconds: list[float] = _drive(python, "tinker_samples.py", url, key, model, *counts)["seconds"]
    return statistics.median(seconds[WARM_UP_ROUNDS:])


def _earliest_s(found_s: float) -> float:
    """When a result that a client had after `found_s` may have been there: right after SkyRL's look before the one that found it."""
    looks = accumulate((min(FIRST_LOOK_S * 1.5**number, LONGEST_LOOK_S) for number in count()), initial=0.0)
    *before, _ = takewhile(lambda look: look < found_s, looks)
    return before[-1] if before else 0.0


def _training(place: Path, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    shape, sequences, tokens = SETTINGS[name]
    model = write_directory(shape, place / "model", getattr(torch, asked.dtype))
    counts, trained = (sequences, tokens, WARM_UP, asked.steps, *AHEAD), sequences * tokens * asked.steps
    with _skyrl(_for_transformers_4(model, place / "peer-model")) as peer:
        found = {"skyrl": _drive(python_of("tinker-0.16"), "tinker_steps.py", peer.url, "tml-none", peer.model, "cross_entropy", *counts)}
        alone_s = computed_s(peer.log.read_text())
    with serving(str(model), keep=False, dtype=asked.dtype, options=("--threads", str(usable_cpus()), "--replicas", "0")) as server:
        for form, loss in (("plain", "cross_entropy"), ("exact", "importance_sampling")):
            found[form] = _drive(Path(sys.executable), "tinker_steps.py", server.url, server.key, "model", loss, *counts)
    speeds = {side: {ahead: shown_form(form, trained) for ahead, form in forms.items()} for side, forms in found.items()}
    best = {side: max(form.get("tokens_per_s", 0) for form in forms.values()) for side, forms in speeds.items()}
    computed = sequences * tokens / alone_s
    return {
        **speeds,
        "skyrl_computes_tokens_per_s": round(computed),
        "ratio": round(best["plain"] / best["skyrl"], 2),
        "exact_ratio": round(best["exact"] / best["skyrl"], 2),
        "at_least": {form: round(best[form] / computed, 2) for form in ("plain", "exact")},
    }


def shown_form(form: dict[str, Any], tokens: int) -> dict[str, float]:
    """A speed only if every step trained: one without has the loss of the step before."""
    losses = form["losses"]
    trained = sum(before != loss for before, loss in pairwise([None, *losses]))
    speed = {"tokens_per_s": round(tokens / form["seconds"])} if trained == len(losses) else {}
    return {**speed, "trained_steps": trained, "first_loss": round(losses[0], 4), "last_loss": round(losses[-1], 4)}


def computed_s(log: str) -> float:
    """Of a step, in the middle of those whose forward was one request, as the engine's log has it."""
    return statistics.median(float(forward) + float(step) for forward, step in COMPUTED.findall(log))


def _drive(python: Path, script: str, *arguments: str | int) -> dict[str, Any]:
    """What a script says that speaks to a server through the SDK of this interpreter."""
    argv = [str(python), str(DRIVERS / script), *map(str, arguments)]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "TINKER_TELEMETRY": "0"}).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _for_transformers_4(model: Path, place: Path) -> Path:
    """The same weights as the peer's older transformers reads them."""
    place.mkdir()
    for file in model.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "config.json").read_text())
    rotations: Any = Qwen3Config.from_pretrained(model).rope_parameters
    config["rope_theta"] = rotations["rope_theta"]
    del config["rope_parameters"]
    (place / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return place


def _server_arguments(port: object, model: object, place: object) -> list[str]:
    where = ["-m", "tx.tinker.api", "--host", "127.0.0.1", "--port", str(port), "--base-model", str(model)]
    return [*where, "--checkpoints-base", f"{place}/checkpoints", "--database-url", f"sqlite:///{place}/t.db", "--backend-config", PEER_BACKEND]


@contextmanager
def _skyrl(model: Path) -> Iterator[Peer]:
    python = python_of("skyrl")
    environment = python.parents[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Path(tempfile.mkdtemp(prefix="skyrl-", dir=model.parent))
    argv = [str(python), *_server_arguments(port, model, place)]
    # It starts its engine through `uv run`, which looks for the first two; its log is folded at so many columns.
    found = {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment}/bin:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "240",
    }
    with (place / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=place, env={**os.environ, **found}, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/docs", process, place / "log")
        yield Peer(f"http://127.0.0.1:{port}", str(model), place / "log")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the peer did not come up:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
