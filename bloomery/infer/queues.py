"""Requests in hand: their samples wait for a place or run in one, and what becomes of them is said when it happens.

`Sampler` brings requests and takes the events away, `Stepper` moves samples between the two queues and ends them.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from bloomery.infer.cache import KeyValueCache
from bloomery.infer.plan import Sample
from bloomery.infer.request import Request
from bloomery.types.errors import BloomeryError
from bloomery.types.generation import Abort, FinishReason, Generate, GenerateFailed, SampleFinished, SamplerEvent


class Queues:
    """Samples in order of arrival; whoever runs has a slot of the cache."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self.requests: dict[str, Request] = {}
        """Those with samples that have not ended, by id."""
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.following: dict[Sample, Future[None]] = {}
        """Samples whose guides are just taking their last tokens."""
        self.events: list[SamplerEvent] = []
        """What nobody was told yet."""

    def add(self, request: Request) -> None:
        """At the end of the queue."""
        self.requests[request.generate.request_id] = request
        self.waiting += request.samples

    def request(self, sample: Sample) -> Request:
        """Whose sample it is."""
        return self.requests[sample.request_id]

    def admit(self, samples: Sequence[Sample]) -> None:
        """Give places to samples that wait."""
        for sample in samples:
            self.waiting.remove(sample)
            self.running.append(sample)
            self._cache.place(sample)

    def preempt(self, samples: Sequence[Sample]) -> None:
        """Take their places from samples that run; they go on from the head of the queue."""
        for sample in samples:
            self._leave(sample)
            # All of it is computed again, by the weights of then.
            sample.stem = self.request(sample).stem
        self.waiting[:0] = samples

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """End a sample, and with the last one its request."""
        self.events.append(SampleFinished(request_id=sample.request_id, sample=sample.index, reason=reason))
        self.following.pop(sample, None)
        request = self.request(sample)
        # The next turn of a conversation, or the same prompt again, begins like this sample; siblings that still run hold most of it.
        alone = sum(other.request_id == sample.request_id for other in self.running) == 1
        if sample in self.running and alone and sample.stem is request.stem:
            self._cache.keep(sample, request.cached_stem(sample))
        self._leave(sample)
        del request.continuations[sample.index]
        if not request.continuations:
            del self.requests[sample.request_id]

    def abort(self, abort: Abort) -> None:
        """End a request's samples, or one of them."""
        for sample in [*self.running, *self.waiting]:
            if sample.request_id == abort.request_id and abort.sample in (None, sample.index):
                self.finish(sample, "abort")

    def abort_all(self) -> None:
        """End whatever is in hand."""
        for sample in [*self.running, *self.waiting]:
            self.finish(sample, "abort")

    def fail(self, request_id: str, error: BloomeryError) -> None:
        """End a request that is in hand."""
        for sample in [sample for sample in (*self.running, *self.waiting) if sample.request_id == request_id]:
            self.following.pop(sample, None)
            self._leave(sample)
        self.refuse(self.requests.pop(request_id).generate, error)

    def break_off(self, message: str) -> None:
        """A step broke, and nothing in the cache can be relied on: every request that took part in it ends; where none runs, all that wait."""
        broken = dict.fromkeys(sample.request_id for sample in self.running or self.waiting)
        # Not released one by one: where memory ran out, a sample has a place without storage.
        self._cache.clear()
        self.running.clear()
        self.waiting = [sample for sample in self.waiting if sample.request_id not in broken]
        self.following = {sample: followed for sample, followed in self.following.items() if sample.request_id not in broken}
        for request_id in broken:
            del self.requests[request_id]
            self.events.append(GenerateFailed(request_id=request_id, message=message, category="server"))

    def refuse(self, generate: Generate, error: BloomeryError) -> None:
        """Say why a request has no answer."""
        message, request_id = error.message, generate.request_id
        self.events.append(GenerateFailed(request_id=request_id, message=message, category=error.category, field=error.field, code=error.code))

    def end_unbegun(self, generate: Generate) -> None:
        """Say of a request that nobody wants it any more, before any sample of it is in hand."""
        for index in range(generate.num_samples):
            self.events.append(SampleFinished(request_id=generate.request_id, sample=index, reason="abort"))

    def take_events(self) -> list[SamplerEvent]:
        """What has happened since they were taken last."""
        events, self.events = self.events, []
        return events

    def forget_all(self) -> None:
        """Nobody listens any more: drop every request without a word."""
        self.requests.clear()
        self.waiting.clear()
        self.running.clear()
        self.following.clear()
        self.events.clear()
        self._cache.clear()

    def _leave(self, sample: Sample) -> None:
        if sample in self.running:
            self.running.remove(sample)
            self._cache.release(sample)
            sample.cached = 0
        else:
            self.waiting.remove(sample)
