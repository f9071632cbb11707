"""One request while it is served: its tokens, its samples, and when they are done."""

import numpy as np

from bloomery.infer.inquiry import Inquiry
from bloomery.infer.plan import Sample, Stem
from bloomery.infer.sampling import Draw
from bloomery.infer.versions import Model
from bloomery.types.generation import FinishReason, Generate, PromptScored


class Request:
    """A request and the samples of it that are not finished."""

    def __init__(self, generate: Generate, model: Model) -> None:
        self.generate, self.model = generate, model
        self.prompt: list[int] = generate.prompt.numpy().tolist()
        self.continuations: dict[int, list[int]] = {index: [] for index in range(generate.num_samples)}
        """Sampled tokens of each open sample."""
        self.begun = False
        """Whether a sample of it has had a place in the cache."""
        self.inquiry = Inquiry(generate) if generate.scores_prompt else None
        """What its prompt is still to be scored for."""
        self.owes_routing = generate.routing
        """Whether its prompt's routing is asked for and was not told yet."""
        self.samples = self._make_samples()
        """All of them as the plan sees them."""
        self._stop_tokens = frozenset(generate.params.stop_tokens)

    @property
    def samples_in_prefill(self) -> bool:
        """Whether the one token that is wanted comes from the prefill itself."""
        return self.generate.params.max_tokens == 1 and self.generate.num_samples == 1

    def tokens(self, index: int, start: int, stop: int) -> list[int]:
        """Tokens of prompt and continuation at positions `start` to `stop`."""
        prompt, sampled = self.prompt, self.continuations[index]
        return prompt[start:stop] + sampled[max(0, start - len(prompt)) : max(0, stop - len(prompt))]

    def cached_stem(self, sample: Sample) -> Stem:
        """The tokens of a sample that lie in the cache."""
        return Stem(self.model.version, np.array(self.tokens(sample.index, 0, sample.cached), np.int32))

    def draw(self, index: int) -> Draw:
        """The next token to choose."""
        return Draw(index, len(self.continuations[index]), self.generate.params)

    def append(self, index: int, token: int, context: int) -> FinishReason | None:
        """Take a sampled token; returns why the sample ends with it, if it does."""
        continuation = self.continuations[index]
        continuation.append(token)
        if token in self._stop_tokens:
            return "stop"
        full = len(continuation) == self.generate.params.max_tokens or len(self.prompt) + len(continuation) == context
        return "length" if full else None

    def take_score(self) -> PromptScored | None:
        """The finished score of the prompt, once; from then on its keys and values may come from anywhere."""
        if self.inquiry is None or not self.inquiry.complete:
            return None
        scored, self.inquiry = self.inquiry.scored(), None
        for sample in self.samples:
            sample.reusable = sample.shared
        return scored

    def _make_samples(self) -> list[Sample]:
        stem, decodes = Stem(self.model.version, np.array(self.prompt, np.int32)), self.generate.params.max_tokens > 0 and not self.samples_in_prefill
        reusable = len(self.prompt) - 1 if self.inquiry is None else self.inquiry.first - 1
        return [
            Sample(
                self.generate.request_id,
                index,
                stem,
                length=len(self.prompt),
                reusable=reusable,
                decodes=decodes,
                left=0 if self.samples_in_prefill else 1,
            )
            for index in self.continuations
        ]
