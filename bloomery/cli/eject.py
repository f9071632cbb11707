"""A job as a script: the same operations over the public API, and so the same weights; the script says where that is not so."""

from typing import Final

from bloomery.jobs.distilled import distill_config
from bloomery.jobs.preferring import preference_config
from bloomery.jobs.reinforced import grpo_config
from bloomery.jobs.supervised import sft_config
from bloomery.recipes.async_grpo import AsyncGrpoConfig
from bloomery.types.errors import Conflict
from bloomery.types.jobs import JobSpec
from bloomery.types.methods import DirectPreference, Distillation, OddsRatioPreference, Reinforcement, Supervised

_HEAD: Final = '''"""What job `{name}` does, over the public API: {promise}."""

import os
from pathlib import Path

from bloomery.client import Client
{imports}
from bloomery.render import ChatTokenizer

client = Client(os.environ.get("BLOOMERY_URL", {url!r}), os.environ["BLOOMERY_API_KEY"])
tokenizer = ChatTokenizer.load(Path(next(model.path for model in client.models() if model.alias == {base!r})))
rows = client.datasets.rows({dataset!r}, {version!r}, {split!r})
'''
_PROMISE: Final = "the same operations, and so the same weights"
_BY_AGENT: Final = f"{_PROMISE}, where the answers of agent `{{agent}}` follow from what it is told"
_ASYNCHRONOUS: Final = """the same with the same settings, and not the same weights.

`asynchronous` reinforcement trains on what was sampled first, so that no two trainings are alike, of a job and its clone neither"""
_END: Final = """digest = run.save_checkpoint("final").result().digest
print("version", run.save_snapshot("final").result().version, "digest", digest)
"""
_SUPERVISED: Final = """data = [datum(*example) for row in rows for example in row_examples(tokenizer, row)]
held_out = {held_out}
{begin}config = {config!r}
fine_tune(run, data, config, lambda step, steps, measured: print(step, steps, measured), held_out=held_out)
"""
_DIRECT: Final = '''{begin}reference = {reference}


def total(answer):
    """The log-probability of an answer under the weights that training is held to."""
    logprobs = reference.score(answer.tokens).prompt_logprobs()
    return sum(weight * logprob for weight, logprob in zip(answer.weights[1:], logprobs[1:], strict=True))


def pair(row):
    """As the recipe takes it."""
    preferred, rejected = row_pair(tokenizer, row)
    return Pair(datum(*preferred), datum(*rejected), (total(preferred), total(rejected)), row.weight)
'''
_BY_ODDS: Final = '''{begin}

def pair(row):
    """As the recipe takes it."""
    preferred, rejected = row_pair(tokenizer, row)
    return Pair(datum(*preferred), datum(*rejected), weight=row.weight)
'''
_PREFERRING: Final = """

held_out = {held_out}
config = {config!r}
optimise(run, [pair(row) for row in rows], config, lambda step, steps, measured: print(step, steps, measured), held_out=held_out)
"""
_REINFORCED: Final = '''problems = [Problem(f"{split}-{{number}}", tuple(row_prompt(tokenizer, row)), row) for number, row in enumerate(rows, 1)]


def grade(rollout):
    """By the grader of the server; one that gives no score is no zero."""
    said = rollout.tokens[:-1] if rollout.stopped else rollout.tokens
    row = rollout.problem.data
    output = OutputRow(item=row.item, output=tokenizer.decode(said), messages=row.messages)
    (result,) = client.graders.run({grader!r}, [output], version={version}).results
    if result.error is not None:
        raise RuntimeError(f"{{result.error.kind}}: {{result.error.detail}}")
    return Reward(rollout.id, result.score, result.metrics)


config = {config!r}
cursor = Path("{name}.cursor.json")
run = train(client, problems, grade, config, cursor, steps={steps}{looked_at}, on_step=lambda step: print(step.step, step.metrics)).run
'''

_AGENT_PROBLEMS: Final = """problems = [
    problem(f"{split}-{{number}}", [*map(plain_message, row.messages)], tools=plain_tools(row.tools) or (), ground_truth=row)
    for number, row in enumerate(rows, 1)
]
"""
_SCORED_AGENT: Final = '''

def score(finished):
    """What the agent came to, by the grader of the server; one that gives no score is no zero."""
    row = finished.problem.data["ground_truth"]
    *before, last = finished.messages or [{{}}]
    output = OutputRow(item=row.item, output=str(last.get("content") or ""), tools=last.get("tool_calls") or [], messages=before)
    (result,) = client.graders.run({grader!r}, [output], version={version}).results
    if result.error is not None:
        raise RuntimeError(f"{{result.error.kind}}: {{result.error.detail}}")
    return Reward(finished.rollout_id, result.score, result.metrics)

'''
_AGENT: Final = """
config = {config!r}
cursor = Path("{name}.cursor.json")
# Where agent `{agent}` is, and where it says how its rollouts end, as in the file of `bloomery up --agents`.
remote = RemoteRollouts(os.environ["AGENT_URL"]{score}, port=int(os.environ["AGENT_PORT"]))
with remote, Agents(remote, tokenizer, timeout_s=float(os.environ.get("AGENT_TIMEOUT_S", "120"))) as agents:
    run = train(client, problems, agents, config, cursor, steps={steps}{looked_at}, on_step=lambda step: print(step.step, step.metrics)).run
"""
_HELD_PROMPTS: Final = """
held_out = [Problem(f"{split}-{{number}}", tuple(row_prompt(tokenizer, row)), row) for number, row in enumerate({rows}, 1)]
"""
_HELD_DIFFERENT: Final = """# One of those with the same prompt.
held_out = [*{problem.prompt: problem for problem in held_out}.values()]
"""
_HELD_AGENT: Final = """
# One of those with the same prompt.
held_out = {{
    tuple(row_prompt(tokenizer, row)): problem(
        f"{split}-{{number}}", [*map(plain_message, row.messages)], tools=plain_tools(row.tools) or (), ground_truth=row
    )
    for number, row in enumerate({rows}, 1)
}}
held_out = [*held_out.values()]
"""
_DISTILLED: Final = """problems = [Problem(f"{split}-{{number}}", tuple(row_prompt(tokenizer, row)), row) for number, row in enumerate(rows, 1)]
config = {config!r}
cursor = Path("{name}.cursor.json")
run = train(client, problems, config, cursor, steps={steps}{looked_at}, on_step=lambda step: print(step.step, step.metrics)).run
"""


def script(spec: JobSpec, url: str = "http://127.0.0.1:8700") -> str:
    """Of a resolved spec, for the server there unless BLOOMERY_URL says another."""
    if spec.begin is not None and spec.begin.waits:
        raise Conflict(f"job `{spec.name}` waits for job `{spec.begin.job}`, where it begins: eject it once that has ended", field="begin.job")
    match spec.method:
        case Supervised():
            return _supervised(spec, url)
        case DirectPreference() | OddsRatioPreference():
            return _preferring(spec, url)
        case Reinforcement():
            return _reinforced(spec, spec.method, url)
        case Distillation():
            return _distilled(spec, spec.method, url)


def _supervised(spec: JobSpec, url: str) -> str:
    config = sft_config(spec)
    held = f"[datum(*example) for row in {_held(spec)} for example in row_examples(tokenizer, row)]" if config.pace.evaluate_every else "[]"
    imports = (
        "from bloomery.recipes.sft import AdamConfig, SftConfig, datum, fine_tune",
        "from bloomery.recipes.steps import Pace",
        "from bloomery.render.rows import row_examples",
    )
    return _head(spec, url, *imports) + _SUPERVISED.format(held_out=held, begin=_begin(spec), config=config) + _END


def _preferring(spec: JobSpec, url: str) -> str:
    config, direct = preference_config(spec), isinstance(spec.method, DirectPreference)
    held = f"[pair(row) for row in {_held(spec)}]" if config.pace.evaluate_every else "[]"
    before = repr(spec.base_model) if spec.begin is None else 'run.save_snapshot("begin").result().version'
    of_pairs = (_DIRECT if direct else _BY_ODDS).format(begin=_begin(spec), reference=f"client.sampler({before})")
    imports = (
        f"from bloomery.recipes.preference import {type(config.loss).__name__}, Pair, PreferenceConfig, optimise",
        "from bloomery.recipes.sft import AdamConfig, datum",
        "from bloomery.recipes.steps import Pace",
        "from bloomery.render.rows import row_pair",
    )
    return _head(spec, url, *imports) + of_pairs + _PREFERRING.format(held_out=held, config=config) + _END


def _reinforced(spec: JobSpec, method: Reinforcement, url: str) -> str:
    config = grpo_config(spec, {"alpha": spec.alpha}, f"ejected {spec.name}")
    loop, stops = "async_grpo" if isinstance(config, AsyncGrpoConfig) else "grpo", method.early_stopping is not None
    named = {"split": spec.data.train, "grader": method.grader, "version": method.grader_version, "name": spec.name, "steps": method.steps}
    named["looked_at"] = _looked_at(stops)
    common = (
        f"from bloomery.recipes.{loop} import {type(config).__name__}, train",
        "from bloomery.recipes.policy import PolicyConfig, Scheduled, Start",
        "from bloomery.recipes.sft import AdamConfig",
    )
    by_grader = ("from bloomery.recipes.rewards import Reward", "from bloomery.types.graders import OutputRow")
    if method.agent is None:
        of_prompts = ("from bloomery.recipes.rollouts import Problem, RolloutConfig", "from bloomery.render.rows import row_prompt")
        held = _held_out(spec, _HELD_PROMPTS) + _HELD_DIFFERENT if stops else ""
        return _head(spec, url, *sorted((*common, *by_grader, *of_prompts))) + held + _REINFORCED.format(config=config, **named) + _END
    of_agent = (
        "from bloomery.recipes.agents import Agents",
        "from bloomery.recipes.remote_rollouts import RemoteRollouts, problem",
        "from bloomery.recipes.rollouts import RolloutConfig",
        f"from bloomery.render.rows import plain_message, plain_tools{', row_prompt' if stops else ''}",
    )
    scored = method.grader is not None
    text = _AGENT_PROBLEMS + (_SCORED_AGENT if scored else "") + _AGENT
    held = _held_out(spec, _HELD_AGENT) if stops else ""
    told = held + text.format(config=config, agent=method.agent, score=", score" if scored else "", **named)
    return _head(spec, url, *sorted((*common, *of_agent, *(by_grader if scored else ())))) + told + _END


def _distilled(spec: JobSpec, method: Distillation, url: str) -> str:
    config = distill_config(spec, {"alpha": spec.alpha}, f"ejected {spec.name}")
    imports = (
        "from bloomery.recipes.distill import DistillConfig, train",
        "from bloomery.recipes.policy import PolicyConfig, Scheduled, Start",
        "from bloomery.recipes.rollouts import Problem, RolloutConfig",
        "from bloomery.recipes.sft import AdamConfig",
        "from bloomery.render.rows import row_prompt",
    )
    stops = method.early_stopping is not None
    named = {"split": spec.data.train, "name": spec.name, "steps": method.steps, "looked_at": _looked_at(stops)}
    return _head(spec, url, *imports) + (_held_out(spec, _HELD_PROMPTS) if stops else "") + _DISTILLED.format(config=config, **named) + _END


def _held_out(spec: JobSpec, text: str) -> str:
    """What ends the loop early is measured on."""
    return text.format(split=spec.evaluation.split, rows=_held(spec))


def _looked_at(stops: bool) -> str:
    return ", held_out=held_out" if stops else ""


def _head(spec: JobSpec, url: str, *imports: str) -> str:
    data, promise = spec.data, _PROMISE
    if isinstance(spec.method, Reinforcement) and spec.method.asynchronous:
        promise = _ASYNCHRONOUS
    elif isinstance(spec.method, Reinforcement) and spec.method.agent is not None:
        promise = _BY_AGENT.format(agent=spec.method.agent)
    named = {"name": spec.name, "base": spec.base_model, "dataset": data.dataset, "version": data.version, "split": data.train, "url": url}
    return _HEAD.format(promise=promise, imports="\n".join(imports), **named)


def _begin(spec: JobSpec) -> str:
    run = f"run = client.create_run({spec.base_model!r}, {spec.rank}, seed={spec.seed}, alpha={spec.alpha!r})\n"
    if spec.begin is None:
        return run
    return f"{run}run.load({spec.begin.run!r}, {spec.begin.checkpoint!r}, optimizer={spec.begin.optimizer}).result()\n"


def _held(spec: JobSpec) -> str:
    data, wanted = spec.data, spec.evaluation
    return f"client.datasets.rows({data.dataset!r}, {data.version!r}, {wanted.split!r}, limit={wanted.rows})"
