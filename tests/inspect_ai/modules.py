"""A task of `inspect_ai` with all that a log may hold: right and wrong answers, several values, words, no score, and samples that fail."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, includes, mean, metric, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver


@solver
def breaks() -> Solver:
    """Asks the model, except where the sample says that it fails."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.metadata.get("breaks"):
            raise RuntimeError("the solver broke")
        return await generate(state)

    return solve


@scorer(metrics={"letters": [mean(), stderr()], "one": [mean()]})
def counts() -> Scorer:
    """Two values."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"letters": len(state.output.completion), "one": 1})

    return score


@metric
def long() -> Metric:
    """A metric of words."""

    def share(scores: list[SampleScore]) -> float:
        return sum(each.score.value == "long" for each in scores) / len(scores)

    return share


@scorer(metrics=[long()])
def word() -> Scorer:
    """A word, which is no number."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="long" if len(state.output.completion) > 8 else "short")

    return score


@scorer(metrics=[mean(), stderr()])
def picky() -> Scorer:
    """Gives one of the samples no score."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float("nan") if state.sample_id == "zlib" else 1.0)

    return score


@task
def modules(temperature: float = 0.0, epochs: int = 1) -> Task:
    """What a module is called, which a small model knows at times."""
    names = ["csv", "json", "zlib", "math", "the"]
    samples = [Sample(id=name, input=f"Say {name}.", target=name[0]) for name in names]
    samples.append(Sample(id="broken", input="Say nothing.", target="x", metadata={"breaks": True}))
    config = GenerateConfig(temperature=temperature, max_tokens=8)
    return Task(dataset=samples, solver=breaks(), scorer=[includes(), counts(), word(), picky()], config=config, epochs=epochs)
