"""What serving costs and how it goes, for Prometheus; and how many samples wait, which the queue is bounded by.

Where a figure means the same as in vLLM it has its name, for dashboards that people have; what is ours begins with `bloomery:`. Requests are measured
where their events pass through the api, so restarts of an engine are part of what they took; the state of engines is what each said last. A request
for several samples counts as that many in all but its prompt.
"""

import math
import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.types.errors import InvalidInput, Unavailable
from bloomery.types.generation import FinishReason, Generate, Priority, SampledToken, SampleFinished
from bloomery.types.kept import KeptTokens
from bloomery.types.serving import QUEUE_BOUNDS_S, QueueTimes

Ended = FinishReason | Literal["error"]
"""Why a sample ended, as vLLM counts it: `error` where its caller was told of one."""
_REASONS: Final[tuple[Ended, ...]] = (*get_args(FinishReason), "error")
_MODEL: Final = ("model_name",)
_PROCESS: Final = ("model_name", "engine")
_FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_BETWEEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_WHOLE_S: Final = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Meters:
    """Counts and times of one api process."""

    def __init__(self, models: Models, processes: Mapping[str, Mapping[str, EngineLink]], max_waiting: int) -> None:
        """`processes`: by base hash, those that hold it by their names."""
        self.max_waiting = max_waiting
        self._names = {base.base_hash: base.alias for base in reversed(models.all())}
        """An engine goes by the first of its names."""
        self._waiting: Tally[str] = Tally()
        """Samples of bounded requests by base hash."""
        self._registry = CollectorRegistry()
        self._registry.register(_Processes(self._names, processes))
        self.figures = _Figures(self._registry)
        self._of_models = {name: _OfModel(self.figures, name) for name in self._names.values()}

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def refused(self, reason: str) -> None:
        """A request was turned away: `requests` or `tokens` (the key's limits), or `queue`."""
        self.figures.refused.labels(reason).inc()

    def most_waiting(self, priority: Priority) -> int:
        """Samples that may wait at a time: what nobody waits for leaves room for whom somebody does."""
        return self.max_waiting if priority == "production" else max(1, self.max_waiting // 2)

    def check_samples(self, samples: int, priority: Priority, *, field: str) -> None:
        """Refuse more than may ever wait at a time: who was told of a full queue would come again for nothing."""
        if samples > (most := self.most_waiting(priority)):
            raise InvalidInput(f"{samples} samples are asked for, and at most {most} may wait here: ask for fewer at a time", field=field)

    def request(self, base_hash: str, generate: Generate, *, bounded: bool) -> "Meter":
        """Watch a request that is submitted now; one that is `bounded` is refused where too many samples wait."""
        samples, waiting, most = generate.num_samples, self._waiting[base_hash], self.most_waiting(generate.priority)
        if bounded:
            self.check_samples(samples, generate.priority, field="n")
        if bounded and waiting + samples > most:
            self.refused("queue")
            raise Unavailable(f"the queue of `{self._names[base_hash]}` is full: {waiting} samples wait, at most {most} may; try again in a moment")
        return Meter(self._of_models[self._names[base_hash]], generate, self._waiting if bounded else Tally(), base_hash)


class Meter:
    """One request, from its submission to its end."""

    def __init__(self, figures: "_OfModel", generate: Generate, waiting: Tally[str], base_hash: str) -> None:
        self._figures, self._waiting, self._base_hash = figures, waiting, base_hash
        self._began_s = time.perf_counter()
        self._last_s: dict[int, float] = {}
        """When each sample gave its latest token."""
        self._tokens: Tally[int] = Tally()
        self._open = set(range(generate.num_samples))
        self._unbegun = set(self._open)
        waiting[base_hash] += len(self._unbegun)
        figures.prompt_tokens.inc(generate.prompt.shape[0])
        figures.cache_queries.inc(generate.prompt.shape[0])
        figures.prompt_length.observe(generate.prompt.shape[0])
        figures.draft_tokens.inc(sum(map(len, generate.drafts)))

    def take(self, event: object) -> None:
        """Something was passed on."""
        match event:
            case SampledToken(sample=sample, kept=kept):
                self._tokens_came(sample, 1)
                self._figures.draft_kept.inc(kept)
            case KeptTokens(sample=sample, tokens=tokens):
                self._tokens_came(sample, len(tokens))
                self._figures.draft_kept.inc(len(tokens))
            case SampleFinished(sample=sample, reason=reason):
                self._end(sample, reason)

    def stopped(self, sample: int) -> None:
        """Whoever reads has enough of a sample: it came to a stop string."""
        self._end(sample, "stop")

    def fail(self) -> None:
        """Whoever reads is told of an error."""
        self._end_all("error")

    def close(self, found_tokens: int) -> None:
        """Nobody reads any more: what is open was aborted. So many tokens of the prompt were in the cache."""
        self._figures.cache_hits.inc(found_tokens)
        self._end_all("abort")

    def _tokens_came(self, sample: int, count: int) -> None:
        """At once: between them nobody waits."""
        now_s = time.perf_counter()
        last_s = self._last_s.get(sample)
        if last_s is None:
            self._begin(sample)
            self._figures.first_token.observe(now_s - self._began_s)
        else:
            self._figures.between_tokens.observe(now_s - last_s)
        self._last_s[sample] = now_s
        self._tokens[sample] += count
        self._figures.generated_tokens.inc(count)

    def _begin(self, sample: int) -> None:
        if sample in self._unbegun:
            self._unbegun.remove(sample)
            self._waiting[self._base_hash] -= 1

    def _end_all(self, reason: Ended) -> None:
        for sample in sorted(self._open):
            self._end(sample, reason)

    def _end(self, sample: int, reason: Ended) -> None:
        if sample not in self._open:
            return
        self._open.remove(sample)
        self._begin(sample)
        self._figures.ended[reason].inc()
        self._figures.whole.observe(time.perf_counter() - self._began_s)
        self._figures.answer_length.observe(self._tokens[sample])


class _Figures:
    """The counters and histograms by name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, labels: Iterable[str] = _MODEL) -> Counter:
            return Counter(name, what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, _MODEL, registry=registry, buckets=buckets)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = counter("vllm:generation_tokens", "Tokens that were sampled.")
        self.draft_tokens = counter("bloomery:draft_tokens", "Tokens that requests guessed of their samples.")
        self.draft_kept = counter("bloomery:draft_tokens_kept", "Sampled tokens that were guessed right, and so verified together.")
        self.cache_queries = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.")
        self.cache_hits = counter("vllm:prefix_cache_hits", "Tokens of prompts whose keys and values were there.")
        self.ended = counter(
            "vllm:request_success", "Samples that ended, by reason: stop, length, abort or error.", ("model_name", "finished_reason")
        )
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From submission to a sample's first token.", _FIRST_TOKEN_S)
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", _BETWEEN_S)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From submission to the end of a sample.", _WHOLE_S)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self.answer_length = histogram("vllm:request_generation_tokens", "Tokens of a sample.", _TOKENS)
        self.refused = counter("bloomery:requests_refused", "Requests turned away, by reason: requests, tokens or queue.", ("reason",))
        for reason in ("requests", "tokens", "queue"):
            self.refused.labels(reason)


class _OfModel:
    """Those of one model, looked up once. They are there before its first request, for rates begin at a zero that was seen."""

    def __init__(self, figures: _Figures, model: str) -> None:
        self.prompt_tokens = figures.prompt_tokens.labels(model)
        self.generated_tokens = figures.generated_tokens.labels(model)
        self.draft_tokens = figures.draft_tokens.labels(model)
        self.draft_kept = figures.draft_kept.labels(model)
        self.cache_queries = figures.cache_queries.labels(model)
        self.cache_hits = figures.cache_hits.labels(model)
        self.ended = {reason: figures.ended.labels(model, reason) for reason in _REASONS}
        self.first_token = figures.first_token.labels(model)
        self.between_tokens = figures.between_tokens.labels(model)
        self.whole = figures.whole.labels(model)
        self.prompt_length = figures.prompt_length.labels(model)
        self.answer_length = figures.answer_length.labels(model)


class _Processes(Collector):
    """What engines and replicas said last; those that are away say nothing but that."""

    def __init__(self, names: Mapping[str, str], processes: Mapping[str, Mapping[str, EngineLink]]) -> None:
        self._links = {(names[base_hash], name): link for base_hash, links in processes.items() for name, link in links.items()}

    def collect(self) -> Iterable[Metric]:
        """Read now."""
        up = GaugeMetricFamily("bloomery:engine_up", "Whether the process answers.", labels=_PROCESS)
        for labels, link in self._links.items():
            up.add_metric(labels, float(link.ready))
        yield up
        for family, field in _of_processes():
            for labels, link in self._links.items():
                if link.status is not None:
                    family.add_metric(labels, getattr(link.status, field))
            yield family
        queued = HistogramMetricFamily("vllm:request_queue_time_seconds", "From a sample's submission to its first place.", labels=_PROCESS)
        for labels, link in self._links.items():
            if link.status is not None:
                times = link.status.queue_times
                queued.add_metric(labels, _up_to(times), times.seconds)
        yield queued


def _up_to(times: QueueTimes) -> list[tuple[str, float]]:
    """The buckets of a histogram, each with those of all before it."""
    return list(zip(map(floatToGoString, (*QUEUE_BOUNDS_S, math.inf)), accumulate(times.counts), strict=True))


def _of_processes() -> list[tuple[GaugeMetricFamily | CounterMetricFamily, str]]:
    """Fresh families, and the field of a process's status that each shows."""

    def gauge(name: str, what: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, what, labels=_PROCESS)

    def counter(name: str, what: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, what, labels=_PROCESS)

    return [
        (gauge("vllm:num_requests_running", "Samples with a place in the batch."), "running_sequences"),
        (gauge("vllm:num_requests_waiting", "Samples in the queue of the process."), "waiting_sequences"),
        (gauge("vllm:kv_cache_usage_perc", "Share of the key and value cache that is in use, 0 to 1."), "cache_usage"),
        (counter("vllm:num_preemptions", "Samples that had to leave the cache before their end."), "preemptions"),
        (gauge("bloomery:queued_operations", "Training operations without a result."), "queued_operations"),
        (counter("bloomery:trained_tokens", "Tokens of training operations."), "tokens_trained"),
    ]
