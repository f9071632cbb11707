"""The kill list, part C, on the path of agents: a model that was taught to say what drifts says it to a real OpenAI client, which goes on from it.

What was sampled stays as it was sampled in the history of the next answer, unless the template writes earlier turns anew, which is a segment of its
own. The drifts of `test_kill_list_tokens` are injected into what lays answers out, and end both loops before anything is learnt.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from bloomery.client import Client
from bloomery.recipes import agents as agents_module
from bloomery.recipes import async_grpo, grpo
from bloomery.recipes.advantages import weigh
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.policy import PolicyConfig, Start
from bloomery.recipes.rollouts import Problem, RolloutConfig
from bloomery.recipes.segments import Segment, Turn, assemble
from bloomery.recipes.sft import datum
from bloomery.render import ChatTokenizer
from bloomery.types.errors import Corrupt
from tests.openai.tool_model import SUM
from tests.recipes.loops import BASE
from tests.recipes.test_kill_list_tokens import ASKED, DRIFTS, NEXT, TURN, WITH_CALLS, Drift, pieces, tokenizer_of

__all__ = ["tokenizer_of"]

CONFIG = RolloutConfig(group_size=2, max_tokens=64, attempts=1, seed=5)
PROBLEM = Problem("sum", ())
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SUM}}
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
STEPS, LEARNING_RATE = 40, 1e-2


class Taught(NamedTuple):
    """A run that says the answer of a drift, as a start for loops."""

    tokenizer: ChatTokenizer
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    start: Start
    version: str


def taught(client: Client, tokenizer: ChatTokenizer, drift: Drift) -> Taught:
    tools = [TOOL] if drift.template == WITH_CALLS else None
    prompt = tokenizer.render_prompt([ASKED], tools=tools)
    answer = pieces(tokenizer, drift)
    run = client.create_run(BASE, rank=8, seed=1)
    for _ in range(STEPS):
        row = datum([*prompt, *answer], [0.0] * len(prompt) + [1.0 / len(answer)] * len(answer))
        loss = run.forward_backward([row], logprobs=False)
        run.optim_step(LEARNING_RATE, grad_clip_norm=1.0)
    assert loss.result().metrics["loss:sum"] < 1e-3
    run.save_checkpoint("taught").result()
    return Taught(tokenizer, tuple(prompt), tuple(answer), Start(run.id, "taught"), run.save_snapshot().result().version)


def agent(drift: Drift, heard: list[Any]) -> Callable[[Episode], float]:
    """Asks, and goes on from the answer as it came; from one of a call without that, where the drift is that a loop leaves it out."""

    def converse(episode: Episode) -> float:
        tools: dict[str, Any] = {"tools": [TOOL]} if drift.template == WITH_CALLS else {}
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as model:
            first = model.chat.completions.create(model=episode.model, messages=[ASKED], **tools).choices[0].message  # type: ignore[list-item]
            heard.append(first)
            kept: Any = {"role": "assistant", "content": ""} if drift.name == "calls of tools left out of the history" else first
            model.chat.completions.create(model=episode.model, messages=[ASKED, kept, NEXT], max_tokens=8, **tools)  # type: ignore[list-item]
        return float(episode.rollout_id.endswith(".0"))

    return converse


def with_tools(drift: Drift) -> str:
    return WITH_TOOLS + drift.template if drift.template == WITH_CALLS else drift.template


GOES_ON = {"newline behind an end token left out", "calls of tools written anew", "pieces joined otherwise"}
REWRITTEN = {"reasoning left out of the history"}


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.name.replace(" ", "-"))
def test_agents_are_trained_on_what_they_were_served_where_others_drift_and_loops_that_drift_are_refused(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_of: Callable[[str], ChatTokenizer], drift: Drift
) -> None:
    model = taught(client, tokenizer_of(with_tools(drift)), drift)
    heard: list[Any] = []
    with Agents(agent(drift, heard), model.tokenizer) as agents:
        made = agents.rollouts(lambda: client.sampler(model.version), CONFIG).group(0, PROBLEM)
        assert made.failures == ()
        for member in made.members:
            _check_laid_out(model, drift, member.rollout.laid_out)
        rows = weigh([made], by_deviation=True)
        scored = client.run(model.start.run_id).forward([row.datum for row in rows], "importance_sampling").result()
        assert scored.metrics["logprob_diff:max"] == 0
        policy = PolicyConfig(base_model=BASE, rank=8, start=model.start, learning_rate=1e-6)
        for path, loop in ((tmp_path / "sync", _synchronous), (tmp_path / "async", _asynchronous)):
            with monkeypatch.context() as patch:
                patch.setattr(agents_module, "assemble", _drifting(model, drift))
                with pytest.raises(Corrupt, match=r"the rollouts of group [0-9]+ are held .* gives other log-probabilities than were served"):
                    loop(client, agents, policy, path)
            loop(client, agents, policy, path)
    assert any("tool_calls" in message.model_dump(exclude_none=True) for message in heard) is (drift.template == WITH_CALLS)


def _check_laid_out(model: Taught, drift: Drift, segments: Sequence[Segment]) -> None:
    served = (*model.prompt, *model.answer)
    first = next(segment for segment in segments if segment.tokens[: len(served)] == served)
    assert all(token in model.tokenizer.end_tokens for token in (model.answer[-1], first.sampled[len(model.answer) - 1]))
    if drift.name in GOES_ON:
        # One conversation: the answer as it was sampled, what the template puts behind it, and the next question.
        assert (len(segments), first.drift) == (1, None)
        assert first.tokens[len(served) : first.places[len(model.answer)]] == tuple(model.tokenizer.encode("\n" + TURN))
    else:
        assert len(segments) == 2
        second = next(segment for segment in segments if segment is not first)
        assert (second.drift is not None) is (drift.name in REWRITTEN)


def _drifting(model: Taught, drift: Drift) -> Callable[[Sequence[Turn]], tuple[Segment, ...]]:
    """Lays out the next answer behind the conversation that others would have put together: never what it was served behind."""
    served = [*model.prompt, *model.answer]
    goes_on = [*served, *model.tokenizer.encode("\n" + TURN)]

    def laid_out(turns: Sequence[Turn]) -> tuple[Segment, ...]:
        others = [drift.again(model.tokenizer, served), goes_on]
        return assemble([turn if turn.prompt == model.prompt else _behind(turn, others) for turn in turns])

    return laid_out


def _behind(turn: Turn, others: Sequence[Sequence[int]]) -> Turn:
    return turn._replace(prompt=next(tuple(tokens) for tokens in others if tuple(tokens) != turn.prompt))


def _synchronous(client: Client, agents: Agents, policy: PolicyConfig, path: Path) -> None:
    grpo.train(client, [PROBLEM], agents, grpo.GrpoConfig(policy=policy, rollouts=CONFIG, groups_per_step=1), path, steps=1)


def _asynchronous(client: Client, agents: Agents, policy: PolicyConfig, path: Path) -> None:
    config = async_grpo.AsyncGrpoConfig(policy=policy, rollouts=CONFIG, groups_per_step=1, concurrency=2)
    async_grpo.train(client, [PROBLEM], agents, config, path, steps=1)
