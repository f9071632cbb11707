"""The whole loop as a client of the public API: measure, train, deploy, measure, serve, collect, curate, retrain, compare, promote.

`run_loop` tells the story; `Loop` holds what its steps share; `LoopReport` is everything a table or a benchmark shows. Feedback is simulated
from labels, because nobody is there to give it: the report says so wherever it is printed.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from bloomery.client import Client, TrainingRun
from bloomery.recipes.neighbours import bag_of_words, majority
from bloomery.recipes.sft import Renderer, SftConfig, SftReport, datum, fine_tune
from bloomery.recipes.task import Question, Task, share_of
from bloomery.types.datasets import ChatRow, DatasetVersion
from bloomery.types.errors import InvalidInput, WorkerError
from bloomery.types.operations import Datum, SnapshotResult
from bloomery.types.resources import Span, Split
from bloomery.types.statistics import Mismatch, Paired, mcnemar, mismatch

Progress = Callable[[str, int, int | None, str], None]
"""Called with (phase, done, total, note); total None marks the beginning (done 0) and the end (done 1) of a phase."""

PARITY_ANSWERS = 64
SWAPS = 5


class Rows(NamedTuple):
    """Disjoint questions: to train on at first, to arrive as traffic, to measure on."""

    first: Sequence[Question]
    traffic: Sequence[Question]
    held_out: Sequence[Question]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """What is trained and under which name it is served; the demo's values are explained in `docs/design/003-demo.md`."""

    deployment: str
    base_model: str
    first: SftConfig
    second: SftConfig
    rank: int = 16
    max_answer_tokens: int = 24
    concurrency: int = 32
    seed: int = 7


class Outcome(NamedTuple):
    """One answer: `label` None means invalid output."""

    id: str
    content: str
    label: str | None
    correct: bool
    version: str


class LoopReport(NamedTuple):
    """What happened. Outcomes are on the same held-out rows in the same order."""

    base: Sequence[Outcome]
    v1: Sequence[Outcome]
    v2: Sequence[Outcome]
    neighbours: dict[str, Sequence[bool]]
    trained_rows: dict[str, int]
    curated: DatasetVersion
    training: dict[str, SftReport]
    comparison: Paired
    promoted: bool
    versions: dict[str, str]
    live: Outcome
    parity: Mismatch
    swap_s: float
    seconds: dict[str, float]


def run_loop(client: Client, task: Task, rows: Rows, render: Renderer, config: LoopConfig, progress: Progress) -> LoopReport:
    """Go once around. A second version that is not better is not promoted, and that ends well too."""
    loop = Loop(client, task, render, config, progress)
    dataset, rows1 = loop.import_rows(rows)
    base = loop.measure("measure base", config.base_model, rows.held_out)

    run1 = client.create_run(config.base_model, config.rank, seed=config.seed, name=f"{config.deployment}-v1")
    trained1 = loop.train("train v1", run1, rows1, config.first)
    snapshot1 = loop.deploy(run1, "v1")
    v1 = loop.measure("measure v1", config.deployment, rows.held_out)

    served = loop.serve_traffic(rows.traffic)
    parity = loop.parity(run1, snapshot1.version)
    curated, rows2 = loop.curate(dataset)

    run2 = client.create_run(config.base_model, config.rank, seed=config.seed, name=f"{config.deployment}-v2")
    run2.load(run1.id, "v1", optimizer=False).result()
    trained2 = loop.train("train v2", run2, rows2, config.second)
    snapshot2 = loop.snapshot(run2, "v2")
    v2 = loop.measure("measure v2", snapshot2.version, rows.held_out)

    comparison = mcnemar([row.correct for row in v1], [row.correct for row in v2])
    live = loop.promote_if_better(comparison, snapshot2.version, ask=rows.held_out[0])
    swap_s = loop.swap_seconds(run2, rows2[: config.second.batch_size], rows.held_out[0])
    return LoopReport(
        base=base,
        v1=v1,
        v2=v2,
        neighbours=loop.neighbours(rows.held_out, v1=rows1, v2=rows2),
        trained_rows={"v1": len(rows1), "v2": len(rows2), "traffic": len(served)},
        curated=curated,
        training={"v1": trained1, "v2": trained2},
        comparison=comparison,
        promoted=comparison.better,
        versions={"v1": snapshot1.version, "v2": snapshot2.version},
        live=live,
        parity=parity,
        swap_s=swap_s,
        seconds=loop.seconds,
    )


class Loop:
    """The steps, in the order in which `run_loop` takes them; `seconds` collects what each took."""

    def __init__(self, client: Client, task: Task, render: Renderer, config: LoopConfig, progress: Progress) -> None:
        self.client, self.task, self.render, self.config, self.progress = client, task, render, config, progress
        self.seconds: dict[str, float] = {}

    def import_rows(self, rows: Rows) -> tuple[DatasetVersion, list[Question]]:
        """The first data-set version; the held-out rows are pinned as its evaluation split."""
        with self._phase("import rows"):
            self.client.datasets.create(self.config.deployment)
            splits: dict[Split, str] = {"train": _jsonl(rows.first), "eval": _jsonl(rows.held_out)}
            version = self.client.datasets.add_version(self.config.deployment, splits)
            rows1 = self._training_rows(version)
            if not rows1:
                raise InvalidInput("every row to train on resembles one that is held out, so none is left: give rows that differ more", field="data")
            return version, rows1

    def measure(self, phase: str, model: str, questions: Sequence[Question]) -> list[Outcome]:
        """Ask every question once, greedily, through the OpenAI-compatible endpoint; not consented to training."""
        with self._phase(phase):
            return self._ask_all(phase, model, questions, consent="eval")

    def train(self, phase: str, run: TrainingRun, questions: Sequence[Question], config: SftConfig) -> SftReport:
        """Fine-tune the run on the questions."""
        with self._phase(phase):
            data = [self._datum(question) for question in questions]
            return fine_tune(run, data, config, lambda done, total, said: self.progress(phase, done, total, f"loss {said['loss']:.3f}"))

    def deploy(self, run: TrainingRun, name: str) -> SnapshotResult:
        """Save, publish, and serve under the deployment's name."""
        with self._phase("deploy"):
            run.save_checkpoint(name).result()
            snapshot = self.snapshot(run, name)
            self.client.deployments.create(self.config.deployment, snapshot.version, {"reason": "first version"})
            return snapshot

    def snapshot(self, run: TrainingRun, name: str | None) -> SnapshotResult:
        """Publish immutable weights for sampling."""
        return run.save_snapshot(name).result()

    def serve_traffic(self, questions: Sequence[Question]) -> list[Outcome]:
        """Rows the model has not seen arrive at the deployment; users judge some of the answers."""
        with self._phase("traffic"):
            outcomes = self._ask_all("traffic", self.config.deployment, questions, consent="train")
        with self._phase("feedback"):
            for done, (question, outcome) in enumerate(zip(questions, outcomes, strict=True), start=1):
                self._judge(question, outcome)
                self.progress("feedback", done, len(questions), "simulated from labels")
        return outcomes

    def curate(self, first: DatasetVersion) -> tuple[DatasetVersion, list[Question]]:
        """The second data-set version: the first one's rows, and what traffic and feedback taught."""
        with self._phase("curate"):
            version = self.client.datasets.curate(self.config.deployment, first.id, deployment=self.config.deployment)
            return version, self._training_rows(version)

    def promote_if_better(self, comparison: Paired, version: str, *, ask: Question) -> Outcome:
        """Make the second version live if it is better, then show what the deployment answers with."""
        with self._phase("promote"):
            if comparison.better:
                self.client.deployments.promote(self.config.deployment, version, {"mcnemar": comparison._asdict()})
            return self._ask(self.config.deployment, ask, consent="none")

    def parity(self, run: TrainingRun, version: str) -> Mismatch:
        """Recorded answers scored again by the trainer that holds the same weights."""
        with self._phase("parity"):
            spans = self.client.spans.list(deployment=self.config.deployment, limit=4 * PARITY_ANSWERS)
            ours = [span for span in spans if span.version == version and span.has_body and span.out_tokens][:PARITY_ANSWERS]
            answers = [answer for span in ours for answer in self._recorded(span)]
            if not answers:
                return mismatch([], [])  # token ids are not kept of texts in which something was redacted
            scored = run.forward([answer.datum for answer in answers]).result()
            sampled = [logprob for answer in answers for logprob in answer.logprobs]
            trained = [
                float(logprob)
                for answer, outputs in zip(answers, scored.outputs, strict=True)
                for logprob in outputs["logprobs"].numpy()[answer.prompt_tokens - 1 :]
            ]
            return mismatch(sampled, trained)

    def swap_seconds(self, run: TrainingRun, questions: Sequence[Question], ask: Question) -> float:
        """Median seconds from submitting `optim_step` to the first token that the new weights serve, on a deployment of its own."""
        with self._phase("swap"):
            name, data = f"{self.config.deployment}-swap", [self._datum(question) for question in questions]
            self.client.deployments.create(name, self.snapshot(run, "swap").version)
            return statistics.median(self._swap(run, data, name, ask) for _ in range(SWAPS))

    def neighbours(self, held_out: Sequence[Question], **versions: Sequence[Question]) -> dict[str, Sequence[bool]]:
        """The classifiers beside the model, refitted on each version's rows."""
        with self._phase("neighbours"):
            fits = (majority, bag_of_words)
            return {f"{fit.__name__}_{version}": fit(train, held_out) for version, train in versions.items() for fit in fits}

    def _training_rows(self, version: DatasetVersion) -> list[Question]:
        stored = self.client.datasets.rows(self.config.deployment, version.id, "train")
        return [self.task.question_of(row.messages) for row in stored if isinstance(row, ChatRow)]

    def _swap(self, run: TrainingRun, data: Sequence[Datum], deployment: str, ask: Question) -> float:
        run.forward_backward(data, logprobs=False).result()
        started = time.monotonic()
        run.optim_step(1e-6)
        version = self.snapshot(run, None).version
        self.client.deployments.promote(deployment, version)
        for chunk in self.client.chat_stream(deployment, list(ask.prompt), max_tokens=1, temperature=0.0):
            if chunk["choices"] and chunk["system_fingerprint"] == version:
                return time.monotonic() - started
        raise WorkerError(f"deployment `{deployment}` did not answer with version {version}")

    def _ask_all(self, phase: str, model: str, questions: Sequence[Question], *, consent: str) -> list[Outcome]:
        outcomes = []
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            for outcome in pool.map(lambda question: self._ask(model, question, consent=consent), questions):
                outcomes.append(outcome)
                right = sum(each.correct for each in outcomes)
                self.progress(phase, len(outcomes), len(questions), f"right {right / len(outcomes):.1%}")
        return outcomes

    def _ask(self, model: str, question: Question, *, consent: str) -> Outcome:
        answer = self.client.chat(
            model,
            list(question.prompt),
            headers={"x-bloomery-consent": consent},
            max_tokens=self.config.max_answer_tokens,
            temperature=0.0,
        )
        content = answer["choices"][0]["message"]["content"] or ""
        label = self.task.read(content)
        return Outcome(answer["id"], content, label, label == question.label, answer["system_fingerprint"])

    def _judge(self, question: Question, outcome: Outcome) -> None:
        """A user: often content and silent, corrects most mistakes, sometimes only says no."""
        mood = share_of(f"{self.config.seed} {question.text}")
        if outcome.correct:
            if mood < 0.5:
                self.client.feedback(outcome.id, "helpful", True)
        elif mood < 0.6:
            self.client.feedback(outcome.id, "correction", question.answer, type="demonstration")
        elif mood < 0.85:
            self.client.feedback(outcome.id, "helpful", False)

    def _datum(self, question: Question) -> Datum:
        return datum(*self.render(question.messages))

    def _recorded(self, span: Span) -> Iterator["_RecordedAnswer"]:
        body = self.client.spans.get(span.id).body
        if body is not None and body["tokens"] is not None:
            yield from (_recorded_answer(body["tokens"]["prompt"], sample) for sample in body["tokens"]["samples"])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.progress(name, 0, None, "")
        started = time.monotonic()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 3)
        self.progress(name, 1, None, "")


class _RecordedAnswer(NamedTuple):
    datum: Datum
    prompt_tokens: int
    logprobs: Sequence[float]


def _recorded_answer(prompt: Sequence[int], sample: dict[str, Any]) -> _RecordedAnswer:
    tokens = [*prompt, *sample["tokens"]]
    return _RecordedAnswer(datum(tokens, [1.0] * len(tokens)), len(prompt), sample["logprobs"])


def _jsonl(questions: Sequence[Question]) -> str:
    return "\n".join(json.dumps({"messages": question.messages}) for question in questions)
