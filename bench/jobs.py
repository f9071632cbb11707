"""What a managed job adds to the loop that it runs: `python -m bench.jobs` prints one JSON line.

The same rows, settings and seed are trained by `recipes/sft` from this process and as a job, in turns, on one server. `loop` and `job` are seconds
from the first operation that the engine was done with to the last, as the metrics of a run tell them, so neither has the start of a process in it;
`job_in_all` is from the creation of a job to its end, and has that, the rendering of rows, the publication and the comparison beside it.
"""

import json
import statistics
import time
from pathlib import Path
from random import Random

from bench.line import Line, parser_of
from bloomery.cli.demo_server import serving
from bloomery.client import Client, TrainingRun
from bloomery.jobs.rows import examples, rows_of
from bloomery.jobs.supervised import sft_config
from bloomery.recipes.pairs import SYSTEM, WORDS
from bloomery.recipes.sft import datum, fine_tune
from bloomery.render import ChatTokenizer
from bloomery.types.jobs import Data, Evaluation, Job, JobSpec, JobState
from bloomery.types.methods import Batches, Optimizer, Supervised

MODEL = "bloomery-tiny"
ROWS_A_STEP = 16


def main() -> None:
    """Train both ways, in turns."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the server's engine")
    asked = parser.parse_args()
    line = Line("jobs")
    with serving(MODEL, keep=False, options=("--threads", str(asked.threads), "--replicas", "0")) as server, Client(server.url, server.key) as client:
        client.datasets.create("rows")
        client.datasets.add_version("rows", {"train": _rows(asked.steps * ROWS_A_STEP)})
        measured = [(_as_job(client, number), _as_loop(client, number)) for number in range(asked.rounds)]
        jobs = [_seconds(job) for (job, _), _ in measured]
        loops = [_seconds(loop) for _, loop in measured]
    in_all = [seconds for (_, seconds), _ in measured]
    ratios = [job / loop for job, loop in zip(jobs, loops, strict=True)]
    seconds = {"job": statistics.median(jobs), "loop": statistics.median(loops), "job_in_all": statistics.median(in_all)}
    line.tell(
        {
            "model": MODEL,
            "steps": asked.steps,
            "rows_a_step": ROWS_A_STEP,
            "threads": asked.threads,
            "rounds": asked.rounds,
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }
    )


def _spec(number: int) -> JobSpec:
    method = Supervised(optimizer=Optimizer(learning_rate=1e-3), batches=Batches(epochs=1, rows=ROWS_A_STEP))
    return JobSpec(name=f"job-{number}", base_model=MODEL, data=Data(dataset="rows"), method=method, evaluation=Evaluation(answers=0), seed=1)


def _as_job(client: Client, number: int) -> tuple[TrainingRun, float]:
    began = time.monotonic()
    job: Job = client.jobs.wait(client.jobs.create(_spec(number)).id, 600)
    if job.state is not JobState.SUCCEEDED or job.run is None:
        raise SystemExit(f"job {number} is {job.state}: {job.reason}")
    return client.run(job.run), time.monotonic() - began


def _as_loop(client: Client, number: int) -> TrainingRun:
    spec = client.jobs.get(f"job-{number}").spec
    tokenizer = ChatTokenizer.load(Path(client.models()[0].path))
    data = [datum(*each) for each in examples(rows_of(client, spec, "train"), tokenizer, 2048, "train")]
    run = client.create_run(MODEL, spec.rank, seed=spec.seed, alpha=spec.alpha)
    fine_tune(run, data, sft_config(spec))
    return run


def _seconds(run: TrainingRun) -> float:
    done = [point.created_us for point in run.metrics()]
    return (max(done) - min(done)) / 1e6


def _rows(count: int) -> str:
    random, lines = Random(1), []
    for _ in range(count):
        words = random.sample(WORDS, 4)
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        asked = ", ".join(f"{key} is {value}" for key, value in pairs.items())
        said = [("system", SYSTEM), ("user", asked), ("assistant", json.dumps(pairs))]
        lines.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in said]}))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
