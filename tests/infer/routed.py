"""What a sampler tells of the routing of its tokens, put together as a datum takes it."""

from collections.abc import Sequence

import numpy as np

from bloomery.infer.sampler import Sampler
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, PromptFound, PromptRouted, SampledToken, SampleFinished, SamplerEvent
from bloomery.types.operations import Datum
from tests.infer.builders import answers, drain
from tests.train.builders import datum

FREE = -1


class Told:
    """What came back for one request: the tokens of each sample, where all its tokens went, and what the answers there were multiplied with.

    `routing` and `weights` are [P + n, L, T] of each sample; weights are told where they were asked.
    """

    def __init__(self, request: Generate, events: Sequence[SamplerEvent]) -> None:
        mine = [event for event in events if event.request_id == request.request_id]
        kinds = [type(event) for event in mine]
        assert kinds.count(PromptRouted) == 1
        assert kinds.index(PromptRouted) < min(kinds.index(kind) for kind in (SampledToken, SampleFinished) if kind in kinds)
        prompt = next(event for event in mine if isinstance(event, PromptRouted))
        self.prompt = request.prompt.numpy().tolist()
        self.found = sum(event.tokens for event in mine if isinstance(event, PromptFound))
        answer = answers(mine)[request.request_id]
        self.tokens = {sample: answer.tokens.get(sample, []) for sample in answer.reasons}
        self.logprobs = {sample: answer.logprobs.get(sample, []) for sample in answer.reasons}
        self.routing: dict[int, np.ndarray] = {}
        self.weights: dict[int, np.ndarray] = {}
        for sample in answer.reasons:
            fed = [event for event in mine if isinstance(event, SampledToken) and event.sample == sample]
            self.routing[sample] = _whole(prompt.experts, [event.fed_experts for event in fed], FREE)
            if request.routing_weights:
                self.weights[sample] = _whole(prompt.expert_weights, [event.fed_expert_weights for event in fed], 0)
            else:
                assert {prompt.expert_weights, *(event.fed_expert_weights for event in fed)} == {None}

    def rollout(self, sample: int = 0, *, routing: bool = False, weights: bool = False) -> Datum:
        """A datum of a sample, as policy gradients take it, with its routing and the weights if that is wanted."""
        tokens, masked = np.array(self.prompt + self.tokens[sample]), [0.0] * (len(self.prompt) - 1)
        made = datum(tokens[:-1], tokens[1:], logprobs=masked + self.logprobs[sample], advantages=masked + [1.0] * len(self.tokens[sample]))
        return Datum(
            tokens=made.tokens,
            inputs=made.inputs,
            routing=Array.of(self.routing[sample][:-1]) if routing else None,
            routing_weights=Array.of(self.weights[sample][:-1]) if weights else None,
        )


def asking(*requests: Generate, engine: Sampler) -> dict[str, Told]:
    """Have all of them served together."""
    for each in requests:
        engine.submit(each)
    events = drain(engine)
    return {each.request_id: Told(each, events) for each in requests}


def _whole(prompt: Array | None, fed: Sequence[Array | None], last: int) -> np.ndarray:
    assert prompt is not None
    assert None not in fed
    parts = [prompt.numpy(), *(array.numpy()[None] for array in fed if array is not None)]
    return np.concatenate([*parts, np.full((1, *prompt.shape[1:]), last, parts[0].dtype)])
