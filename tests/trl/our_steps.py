"""The same steps with our recipes, over the public API of a running server; gradients are read from a checkpoint behind them.

A run that begins has no moments, so AdamW's first moment behind its first step is the gradient times `1 - beta1`; with a `beta1` of 0 it is the
gradient of the last step, of however many.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.client import Client, TrainingRun
from bloomery.models.load import load_decoder, stored_tensors
from bloomery.recipes import grpo
from bloomery.recipes.advantages import mean_over_tokens, weigh
from bloomery.recipes.grpo import GrpoConfig
from bloomery.recipes.policy import PolicyConfig
from bloomery.recipes.preference import Pair, PairLoss, PreferenceConfig, both, optimise
from bloomery.recipes.rollouts import Graded, Group, Problem, Rollout, RolloutConfig
from bloomery.recipes.sft import AdamConfig, SftConfig, datum, fine_tune
from bloomery.train import checkpoint
from bloomery.types.operations import Datum
from tests.live import LiveServer

ADAM: Final = AdamConfig(learning_rate=1e-4, beta1=0.0)
POLICY_BETA1: Final = 0.9
"""Of the loops of `policy`."""
SMOOTH: Final = {"beta1": 0.0, "beta2": 0.95, "eps": 1.0}
"""With so large an `eps` a first step is as long as its gradient: with a small one it has the gradient's sign, of those too that are nothing but
rounding, and two sides could not stay together over two steps."""
GROUP_SIZE: Final = 6


class Stepped(NamedTuple):
    """Losses of the steps, gradients of the last by the names of the model's directory, and what the last showed."""

    losses: Sequence[float]
    gradients: Mapping[str, Tensor]
    shown: Mapping[str, float]


class Drawn(NamedTuple):
    """A step of the loop, and the groups that it drew for it."""

    stepped: Stepped
    groups: Sequence[Group]


class Row(NamedTuple):
    """Tokens, and the loss weight of each."""

    tokens: list[int]
    weights: list[float]


class Choice(NamedTuple):
    """A prompt, the answer that is preferred, and the other."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Ours:
    """A server with the models of both sides: `policy`, which is trained with all parameters, and `reference`."""

    def __init__(self, server: LiveServer, client: Client, policy: Path) -> None:
        self._server, self._client, self._policy = server, client, policy

    def sft(self, rows: Sequence[Row]) -> Stepped:
        run = self._run()
        report = fine_tune(run, [datum(*row) for row in rows], SftConfig(epochs=1, adam=ADAM, batch_size=len(rows)))
        return Stepped(report.losses, self._gradients(run), {})

    def preference(self, choices: Sequence[Choice], loss: PairLoss) -> Stepped:
        run, points = self._run(), list[dict[str, float]]()
        config = PreferenceConfig(epochs=1, loss=loss, adam=ADAM, batch_pairs=len(choices))
        optimise(run, self._referred([_pair(choice) for choice in choices]), config, lambda _, __, values: points.append(values))
        return Stepped([point["loss"] for point in points], self._gradients(run), points[-1])

    def loop(
        self, problems: Sequence[Problem], reward: Callable[[Rollout], float], by_deviation: bool, cursor: Path, temperature: float = 1.0
    ) -> Drawn:
        """A step of the loop."""
        drawn, reports = defaultdict[str, list[Graded]](list), list[dict[str, float]]()

        def grade(rollout: Rollout) -> float:
            drawn[rollout.problem.id].append(Graded(rollout, reward(rollout), {}))
            return reward(rollout)

        config = GrpoConfig(
            policy=PolicyConfig(base_model="policy", rank=0, learning_rate=ADAM.learning_rate, grad_clip_norm=0.0),
            rollouts=RolloutConfig(group_size=GROUP_SIZE, max_tokens=24, temperature=temperature),
            groups_per_step=len(problems),
            by_deviation=by_deviation,
        )
        policy = grpo.train(self._client, problems, grade, config, cursor, steps=1, on_step=lambda report: reports.append(report.metrics))
        gradients = {name: moment / (1 - POLICY_BETA1) for name, moment in self._gradients(policy.run).items()}
        # Graders are asked in the order in which rollouts end.
        members = [tuple(sorted(drawn[problem.id], key=lambda member: member.rollout.id)) for problem in problems]
        groups = [Group(number, problem, made, ()) for number, (problem, made) in enumerate(zip(problems, members, strict=True))]
        return Drawn(Stepped([reports[0]["loss"]], gradients, reports[0]), groups)

    def loss(self, groups: Sequence[Group], loss: str, options: dict[str, float | str], learning_rate: float) -> Stepped:
        """Two steps on the same rollouts: of the second they are no longer of the weights that it begins with."""
        run = self._run()
        data = [row.datum for row in mean_over_tokens(weigh(groups, by_deviation=False))]
        metrics = []
        for _ in range(2):
            metrics.append(run.forward_backward(data, loss, options).result().metrics)
            run.optim_step(learning_rate, **SMOOTH).result()
        return Stepped([each["loss:sum"] for each in metrics], self._gradients(run), metrics[-1])

    def _run(self) -> TrainingRun:
        return self._client.create_run("policy", 0)

    def _referred(self, pairs: Sequence[Pair]) -> list[Pair]:
        told = self._client.create_run("reference", 0).forward(both(pairs)).result()
        sums = [
            float(row.inputs["weights"].numpy().astype(np.float64) @ output["logprobs"].numpy().astype(np.float64))
            for row, output in zip(both(pairs), told.outputs, strict=True)
        ]
        return [pair._replace(reference=(sums[2 * place], sums[2 * place + 1])) for place, pair in enumerate(pairs)]

    def _gradients(self, run: TrainingRun) -> dict[str, Tensor]:
        """The first moments of a run, by the names that its model's directory has."""
        key = run.save_checkpoint("stepped").result().key
        state = checkpoint.read((self._server.data_dir / "blobs" / key).read_bytes(), key)
        decoder = load_decoder(self._policy, dtype=torch.float32)
        for name, parameter in decoder.named_parameters():
            parameter.copy_(state.tensors[f"first/{name}"])
        return stored_tensors(decoder)


def _pair(choice: Choice) -> Pair:
    def answered(answer: list[int]) -> Datum:
        return datum([*choice.prompt, *answer], [0.0] * len(choice.prompt) + [1.0] * len(answer))

    return Pair(answered(choice.chosen), answered(choice.rejected))
