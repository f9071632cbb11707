"""What jobs do, as loops of the unmodified `tinker` SDK: the operations of each method, from a resolved spec and the rows that it names."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

from bloomery.client import Client
from bloomery.jobs.distilled import distill_config
from bloomery.jobs.preferring import preference_config
from bloomery.jobs.reinforced import grpo_config
from bloomery.jobs.rows import examples, pairs, problems, rows_of
from bloomery.jobs.supervised import sft_config
from bloomery.recipes.advantages import mean_over_tokens, sort_groups, weigh
from bloomery.recipes.dealing import deal
from bloomery.recipes.distill import learnt, losing, worth
from bloomery.recipes.grpo import GrpoConfig, problem_of
from bloomery.recipes.policy import PolicyConfig, at_temperature
from bloomery.recipes.preference import Pair, both, judge, weighed
from bloomery.recipes.rollouts import Graded, Group, Problem, Rollout, RolloutConfig, derived_seed
from bloomery.recipes.sft import AdamConfig, datum, mean_weighted
from bloomery.render import ChatTokenizer
from bloomery.render.rows import RenderedPair
from bloomery.types.arrays import Array
from bloomery.types.graders import OutputRow
from bloomery.types.jobs import JobSpec
from bloomery.types.methods import DirectPreference, Distillation, Reinforcement
from bloomery.types.operations import Datum, ForwardBackwardResult


class Learner:
    """A run of the SDK's, and where what it is trained on is from."""

    def __init__(self, service: tinker.ServiceClient, client: Client, spec: JobSpec) -> None:
        self.service, self.client, self.spec = service, client, spec
        self.tokenizer = ChatTokenizer.load(Path(next(model.path for model in client.models() if model.alias == spec.base_model)))
        self.run = service.create_lora_training_client(base_model=spec.base_model, rank=spec.rank, seed=spec.seed).result()

    def rows(self) -> list[Any]:
        """Of the split that is trained on."""
        return rows_of(self.client, self.spec, self.spec.data.train)

    def train(self, data: Sequence[Datum], loss: Any, options: dict[str, float], update: dict[str, float]) -> None:
        """Gradients, and one step of the optimizer."""
        self.run.forward_backward(told(data), loss, options).result()
        self.run.optim_step(types.AdamParams(**update)).result()

    def digest(self, name: str) -> str | None:
        """Of the weights that it has now, which are kept under a name."""
        self.run.save_state(name).result()
        return self.client.run(self.run.model_id).state().digest


def sft(learner: Learner) -> None:
    """Cross-entropy of rows, over the sum of their weights."""
    spec, config = learner.spec, sft_config(learner.spec)
    data = [datum(*each) for each in examples(learner.rows(), learner.tokenizer, spec.room, "train")]
    for batch, update in _dealt(len(data), config.epochs, config.batch_size, config.seed, config.adam):
        learner.train(mean_weighted([data[place] for place in batch]), "cross_entropy", {}, update)


def preferences(learner: Learner) -> None:
    """Log-probabilities, and the gradient of a cross-entropy whose weights are the derivatives of the loss by them."""

    def gradient(batch: Sequence[Pair]) -> None:
        found = learner.run.forward(told(both(batch)), "cross_entropy").result()
        weights = _slopes(learner.spec, batch, [output["logprobs"].to_numpy() for output in found.loss_fn_outputs])
        learner.run.forward_backward(told(weights), "cross_entropy").result()

    _preferring(learner, gradient)


def preferences_by_custom_loss(learner: Learner) -> None:
    """The same by `forward_backward_custom`, which sends both by itself."""

    def gradient(batch: Sequence[Pair]) -> None:
        def loss(_: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            weights = [row.inputs["weights"].numpy() for row in _slopes(learner.spec, batch, [each.detach().numpy() for each in logprobs])]
            return torch.stack([-(torch.tensor(weight) * each).sum() for weight, each in zip(weights, logprobs, strict=True)]).sum(), {}

        learner.run.forward_backward_custom(told(both(batch)), loss).result()

    _preferring(learner, gradient)


def rft(learner: Learner) -> None:
    """Groups of answers by the newest weights, graded by the server's grader, and a step of what they teach."""
    method, config = learner.spec.method, grpo_config(learner.spec, {}, "")
    assert isinstance(method, Reinforcement)
    assert isinstance(config, GrpoConfig)

    def grade(rollout: Rollout) -> Graded:
        row = rollout.problem.data
        said = learner.tokenizer.decode(rollout.tokens[:-1] if rollout.stopped else rollout.tokens)
        output = OutputRow(item=row.item, output=said, messages=row.messages)
        (result,) = learner.client.graders.run(method.grader or "", [output], version=method.grader_version).results
        assert result.score is not None
        return Graded(rollout, result.score, {})

    given, sampler = _problems(learner), learner.run.save_weights_and_get_sampling_client().result()
    for step in range(method.steps):
        groups = [
            Group(number, problem, tuple(map(grade, _answers(sampler, number, problem, config.rollouts))), ())
            for number, problem in _of_step(given, step, config.groups_per_step, config.rollouts)
        ]
        kept = sort_groups(groups, config.min_group_size).trained
        data = [row.datum for row in mean_over_tokens(weigh(kept, by_deviation=config.by_deviation))]
        if data:
            _learn(learner, data, at_temperature(config.policy, config.rollouts.temperature), step)
            sampler = learner.run.save_weights_and_get_sampling_client().result()


def distill(learner: Learner) -> None:
    """Answers of the teacher, learnt word for word; or of the newest weights, by how much likelier the teacher has their tokens."""
    method, config = learner.spec.method, distill_config(learner.spec, {}, "")
    assert isinstance(method, Distillation)
    # The SDK names weights by where they are, and the job by their version.
    kept = next((each for each in learner.client.snapshots() if each.version == config.teacher), None)
    named = {"base_model": config.teacher} if kept is None else {"model_path": f"tinker://{kept.run_id}/sampler_weights/{kept.name}"}
    teacher = learner.service.create_sampling_client(**named).result()
    on_policy, given = method.mode == "on_policy", _problems(learner)
    sampler = learner.run.save_weights_and_get_sampling_client().result() if on_policy else teacher
    for step in range(method.steps):
        asked = _of_step(given, step, config.prompts_per_step, config.rollouts)
        answers = [answer for number, problem in asked for answer in _answers(sampler, number, problem, config.rollouts)]
        segments = [segment for answer in answers for segment in answer.segments]
        if not on_policy:
            _learn(learner, learnt(segments), losing(config), step)
            continue
        scored = [teacher.compute_logprobs(types.ModelInput.from_ints([*segment.tokens])).result() for segment in segments]
        theirs = [[logprobs[place] or 0.0 for place in segment.places] for segment, logprobs in zip(segments, scored, strict=True)]
        _learn(learner, [row.datum for row in mean_over_tokens(worth(segments, theirs))], losing(config), step)
        sampler = learner.run.save_weights_and_get_sampling_client().result()


def told(data: Sequence[Datum]) -> list[types.Datum]:
    """As the SDK sends them."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row.tokens.numpy().tolist()),
            loss_fn_inputs={name: tinker.TensorData.from_numpy(array.numpy()) for name, array in row.inputs.items()},
        )
        for row in data
    ]


def _dealt(rows: int, epochs: float, of_step: int, seed: int, adam: AdamConfig) -> Iterator[tuple[list[int], dict[str, float]]]:
    batches = deal([1] * rows, epochs=epochs, rows=of_step, tokens=None, seed=seed)
    for step, batch in enumerate(batches):
        yield batch, {"learning_rate": adam.rate(step, len(batches)), **adam.others}


def _preferring(learner: Learner, gradient: Callable[[Sequence[Pair]], None]) -> None:
    spec, config = learner.spec, preference_config(learner.spec)
    reference = learner.service.create_sampling_client(base_model=spec.base_model).result() if isinstance(spec.method, DirectPreference) else None
    data = [
        Pair(datum(*row.rendered.preferred), datum(*row.rendered.rejected), _reference(reference, row.rendered), row.weight)
        for row in pairs(learner.rows(), learner.tokenizer, spec.room, "train")
    ]
    for batch, update in _dealt(len(data), config.epochs, config.batch_pairs, config.seed, config.adam):
        gradient([data[place] for place in batch])
        learner.run.optim_step(types.AdamParams(**update)).result()


def _reference(sampler: tinker.SamplingClient | None, answers: RenderedPair) -> tuple[float, float]:
    """Log-probabilities of both answers by what is served of the weights that training is held to."""
    if sampler is None:
        return 0.0, 0.0
    chosen, rejected = (sampler.compute_logprobs(types.ModelInput.from_ints([*answer.tokens])).result() for answer in answers)
    sums = [
        sum(weight * (logprob or 0.0) for weight, logprob in zip(answer.weights[1:], logprobs[1:], strict=True))
        for answer, logprobs in zip(answers, (chosen, rejected), strict=True)
    ]
    return sums[0], sums[1]


def _slopes(spec: JobSpec, batch: Sequence[Pair], logprobs: Sequence[np.ndarray]) -> list[Datum]:
    found = ForwardBackwardResult(outputs=tuple({"logprobs": Array.of(each.astype(np.float32))} for each in logprobs), metrics={})
    return weighed(both(batch), judge(batch, found, preference_config(spec).loss).slopes)


def _problems(learner: Learner) -> list[Problem]:
    return problems(learner.rows(), learner.tokenizer, learner.spec.room, learner.spec.data.train)


def _of_step(given: Sequence[Problem], step: int, count: int, config: RolloutConfig) -> list[tuple[int, Problem]]:
    return [(number, problem_of(given, number, config.seed)) for number in range(step * count, (step + 1) * count)]


def _answers(sampler: tinker.SamplingClient, number: int, problem: Problem, config: RolloutConfig) -> list[Rollout]:
    params = types.SamplingParams(max_tokens=config.max_tokens, seed=derived_seed(config.seed, number), temperature=config.temperature)
    found = sampler.sample(types.ModelInput.from_ints([*problem.prompt]), config.group_size, params).result().sequences
    return [
        Rollout(str(place), problem, (*each.tokens,), (*(each.logprobs or ()),), ("",) * len(each.tokens), each.stop_reason == "stop")
        for place, each in enumerate(found)
    ]


def _learn(learner: Learner, data: Sequence[Datum], policy: PolicyConfig, step: int) -> None:
    learner.train(data, policy.loss, dict(policy.loss_config), policy.update(step))
