"""Each method on the demo's task, before and after: `python -m bench.methods` prints one JSON line.

The task is to name the package of the standard library that a piece of documentation belongs to. One server trains managed jobs: `sft` on the
first rows, and `dpo`, `orpo` and `rft`, each from where a short SFT of its own (`warm`) ended, on the rows that the demo receives as traffic: the
right answer preferred to what `warm` wrongly says at temperature 1, or a reward of 1 for the right one. At the end one evaluation puts the base
model and all of them to the rows that nobody trained on, greedily, and grades the answers word for word. `methods` has seconds and the job's own
comparison with what it began with; `models` has the share of right answers of each with 95 % intervals, and `differences` the paired ones to what
each began with.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.line import Line, parser_of
from bloomery.cli.demo_server import serving
from bloomery.client import Client
from bloomery.recipes.demo_rows import from_stdlib
from bloomery.recipes.task import Question
from bloomery.types.evaluations import AnswerParams, ChosenGrader, EvaluatedModel, EvaluationData, EvaluationItem, EvaluationSpec, EvaluationState
from bloomery.types.jobs import Begin, Data, Evaluation, Job, JobSpec, JobState
from bloomery.types.methods import Batches, DirectPreference, Method, OddsRatioPreference, Optimizer, Reinforcement, Supervised
from bloomery.types.resources import Split

MODEL: Final = "bloomery-tiny"
GRADER: Final = {"type": "string_check", "name": "right", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}", "operation": "eq"}
RIGHT: Final = ChosenGrader(grader="right")
ANSWER_TOKENS: Final = 24
_SPLITS: Final[tuple[Split, ...]] = ("train", "eval")
TIMEOUT_S: Final = 7200.0


def main() -> None:
    """Train every method, then evaluate all of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of the server's engine")
    parser.add_argument("--rows", type=int, default=None, help="of each split at most; all where none are named")
    parser.add_argument("--steps", type=int, default=150, help="of reinforcement")
    asked = parser.parse_args()
    line = Line("methods")
    options = ("--threads", str(asked.threads), "--replicas", "0", "--jobs", "1")
    with serving(MODEL, keep=False, options=options) as server, Client(server.url, server.key) as client:
        counts = _upload(client, asked.rows)
        jobs = {name: _done(client, spec) for name, spec in _supervised().items()}
        counts |= _prefer(client, "warm")
        jobs |= {name: _done(client, spec) for name, spec in _behind("warm", asked.steps).items()}
        evaluated = _evaluate(client, [MODEL, *(job.result.version for job, _ in jobs.values() if job.result is not None)])
    names = dict(zip((each["model"] for each in evaluated["models"]), ("base", *jobs), strict=True))
    line.tell(
        {
            "model": MODEL,
            "threads": asked.threads,
            "rows": counts,
            "methods": {name: _told(job, seconds) for name, (job, seconds) in jobs.items()},
            "models": {names[each["model"]]: _right(each) for each in evaluated["models"]},
            "differences": _differences(evaluated["differences"], names),
        }
    )


def _upload(client: Client, most: int | None) -> dict[str, int]:
    """Two data sets of the demo's rows; the last split of each is held out."""
    rows = from_stdlib().rows
    first, traffic, held_out = (list(part)[:most] for part in rows)

    def chat(row: Question) -> dict[str, Any]:
        return {"messages": row.messages}

    def prompt(row: Question) -> dict[str, Any]:
        return {"messages": list(row.prompt), "answer": row.answer}

    for name, form, train in (("conversations", chat, first), ("prompts", prompt, traffic)):
        client.datasets.create(name)
        client.datasets.add_version(name, {"train": _lines([form(row) for row in train]), "eval": _lines([form(row) for row in held_out])})
    client.graders.create("right", GRADER)
    return {"first": len(first), "traffic": len(traffic), "held_out": len(held_out)}


def _prefer(client: Client, job: str) -> dict[str, int]:
    """A data set of the rows that what came of a job answers wrongly when it is sampled once: the right answer is preferred to that."""
    train, held_out = ([_preference(item) for item in _answered_wrongly(client, job, split)] for split in _SPLITS)
    client.datasets.create("preferences")
    client.datasets.add_version("preferences", {"train": _lines(train), "eval": _lines(held_out)})
    return {"pairs": len(train), "held_out_pairs": len(held_out)}


def _answered_wrongly(client: Client, job: str, split: Split) -> list[EvaluationItem]:
    result = client.jobs.get(job).result
    assert result is not None
    data, params = EvaluationData(dataset="prompts", split=split), AnswerParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=1)
    spec = EvaluationSpec(name=f"sampled-{split}", data=data, models=[EvaluatedModel(model=result.version)], graders=[RIGHT], params=params)
    sampled = client.evaluations.wait(client.evaluations.create(spec).id, TIMEOUT_S)
    return list(client.evaluations.items(sampled.id, status="failed"))


def _preference(item: EvaluationItem) -> dict[str, Any]:
    preferred, other = ([{"role": "assistant", "content": content}] for content in (item.item["answer"], item.answer.text))
    return {"input": {"messages": item.messages}, "preferred_output": preferred, "non_preferred_output": other}


def _supervised() -> dict[str, JobSpec]:
    """From the model that ships on, in the order in which they are trained."""
    adam = Optimizer(learning_rate=4e-3)
    return {
        name: _spec(name, "conversations", Supervised(optimizer=adam, batches=Batches(epochs=epochs, rows=16)))
        for name, epochs in (("warm", 1), ("sft", 3))
    }


def _behind(before: str, steps: int) -> dict[str, JobSpec]:
    """The same from where a job ended."""
    methods: dict[str, Method] = {
        "dpo": DirectPreference(),
        "orpo": OddsRatioPreference(optimizer=Optimizer(learning_rate=3e-4)),
        "rft": Reinforcement(grader="right", steps=steps, max_tokens=ANSWER_TOKENS),
    }
    return {name: _spec(name, "prompts" if name == "rft" else "preferences", method, before) for name, method in methods.items()}


def _spec(name: str, dataset: str, method: Method, begin: str | None = None) -> JobSpec:
    return JobSpec(
        name=name,
        base_model=MODEL,
        data=Data(dataset=dataset),
        method=method,
        begin=None if begin is None else Begin(job=begin),
        evaluation=Evaluation(rows=128, max_tokens=ANSWER_TOKENS),
        seed=1,
    )


def _done(client: Client, spec: JobSpec) -> tuple[Job, float]:
    began = time.monotonic()
    job = client.jobs.wait(client.jobs.create(spec).id, TIMEOUT_S)
    if job.state is not JobState.SUCCEEDED:
        raise SystemExit(f"job {spec.name} is {job.state}: {job.reason}")
    return job, time.monotonic() - began


def _evaluate(client: Client, names: Sequence[str]) -> dict[str, Any]:
    params, models = AnswerParams(max_tokens=ANSWER_TOKENS), [EvaluatedModel(model=name) for name in names]
    spec = EvaluationSpec(name="all", data=EvaluationData(dataset="prompts"), models=models, graders=[RIGHT], params=params)
    done = client.evaluations.wait(client.evaluations.create(spec).id, TIMEOUT_S)
    if done.state is not EvaluationState.SUCCEEDED or done.result is None:
        raise SystemExit(f"the evaluation is {done.state}: {done.reason}")
    return done.result.model_dump(mode="json")


def _told(job: Job, seconds: float) -> dict[str, Any]:
    assert job.result is not None
    compared = [each.model_dump(mode="json") for each in job.result.compared]
    return {"steps": job.result.step, "trained_tokens": job.progress.tokens, "seconds": round(seconds, 1), "compared": compared}


def _right(model: dict[str, Any]) -> dict[str, Any]:
    (grader,) = model["graders"]
    return {"right": grader["mean"], "invalid": grader["invalid"], "latency_p50_s": model["latency_p50_s"], "latency_p95_s": model["latency_p95_s"]}


def _differences(pairs: Sequence[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """Of each model and what it began with."""
    began = {"warm": "base", "sft": "base", "dpo": "warm", "orpo": "warm", "rft": "warm"}
    found = []
    for pair in pairs:
        first, second = names[pair["model"]], names[pair["other"]]
        if began.get(first) == second or began.get(second) == first:
            found.append({"model": first, "than": second, **{key: pair[key] for key in ("rows", "difference", "wins", "losses", "ties")}})
    return found


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


if __name__ == "__main__":
    main()
