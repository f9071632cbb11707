"""The front door: runs, deployments, data sets, traffic, keys, and a chat call."""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, Unpack
from urllib.parse import quote

import httpx

from bloomery.client.datasets import Datasets
from bloomery.client.evaluations import Evaluations
from bloomery.client.graders import Graders
from bloomery.client.http import Http, error_in
from bloomery.client.jobs import Jobs, Runner, Working
from bloomery.client.sampling import Sampler, SamplingSession
from bloomery.client.training import TrainingRun
from bloomery.types.deployments import Deployment, Swap, VersionFiles
from bloomery.types.keys import Key, NewKey
from bloomery.types.model_cards import ModelCard
from bloomery.types.resources import (
    AgentShown,
    Checkpoint,
    Collected,
    CreateRun,
    EndpointShown,
    Feedback,
    FeedbackSource,
    FeedbackType,
    Fidelity,
    GiveFeedback,
    Model,
    Price,
    Run,
    RunOptions,
    Span,
    SpanDetail,
    Status,
)
from bloomery.types.traffic import SpanKind, SpanOrder, SpansWanted, TrafficReport

_MEASURE_S: Final = 600.0
"""A card is measured when those before it are, by processes that have other things to do."""


class Client:
    """A Bloomery server. `transport` replaces the network, in tests for example.

    Whatever lists something gives a list, read to its end before it is returned; `limit`, where there may be many, reads no further than that.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8700",
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 120.0,
    ) -> None:
        key = api_key if api_key is not None else os.environ.get("BLOOMERY_API_KEY", "")
        self._http = Http(base_url, key, transport=transport, timeout_s=timeout_s, patience_s=patience_s)
        self.deployments = Deployments(self._http)
        self.datasets = Datasets(self._http)
        self.spans = Spans(self._http)
        self.keys = Keys(self._http)
        self.versions = Versions(self._http)
        self.graders = Graders(self._http)
        self.evaluations = Evaluations(self._http)
        self.jobs = Jobs(self._http)
        self._sampling = SamplingSession(self._http)

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_run(
        self, base_model: str, rank: int, *, seed: int | None = None, idempotency_key: str | None = None, **options: Unpack[RunOptions]
    ) -> TrainingRun:
        """Create a LoRA run, or with rank 0 one of all parameters. Without a seed the server draws one.

        A program that gives an `idempotency_key` and is started again finds the run that it made before.
        """
        body = CreateRun(base_model=base_model, rank=rank, seed=seed, **options)
        # The server may die after it made the run and before it said so: asked again under the same key, it finds that run.
        headers = {"x-idempotency-key": idempotency_key or secrets.token_hex(16)}
        made = self._http.post("/api/v1/runs", body.model_dump(), repeatable=True, headers=headers)
        return TrainingRun(self._http, Run.model_validate(made))

    def run(self, run_id: str) -> TrainingRun:
        """Take up a run where its last submitted operation left it."""
        return TrainingRun(self._http, Run.model_validate(self._http.get(f"/api/v1/runs/{run_id}")))

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        return [Run.model_validate(item) for item in self._http.pages("/api/v1/runs")]

    def snapshots(self) -> list[Checkpoint]:
        """What all runs have published under a name, newest first."""
        return [Checkpoint.model_validate(item) for item in self._http.pages("/api/v1/snapshots")]

    def sampler(self, model: str) -> Sampler:
        """What samples token ids for training, from a base model, a snapshot's version or a `tinker://` path: these weights, whatever comes after."""
        return Sampler(self._http, self._sampling, model)

    def runner(self, name: str) -> Runner:
        """Who gives processes to jobs."""
        return Runner(self._http, name)

    def working(self, job: str) -> Working:
        """Who works at a job, with the key of its lease."""
        return Working(self._http, job)

    def models(self) -> list[Model]:
        """The base models that the server holds."""
        return [Model.model_validate(item) for item in self._http.get("/api/v1/models")["data"]]

    def endpoints(self) -> list[EndpointShown]:
        """Models elsewhere that graders and evaluations of this project may ask."""
        return [EndpointShown.model_validate(item) for item in self._http.pages("/api/v1/endpoints")]

    def agents(self) -> list[AgentShown]:
        """Agents elsewhere that jobs of this project may train."""
        return [AgentShown.model_validate(item) for item in self._http.pages("/api/v1/agents")]

    def status(self) -> Status:
        """How the server is."""
        return Status.model_validate(self._http.get("/api/v1/status"))

    def collect_garbage(self) -> Collected:
        """Delete expired traffic and blobs that nothing refers to."""
        return Collected.model_validate(self._http.post("/api/v1/gc", {}, repeatable=True))

    def feedback(
        self,
        target: str,
        metric: str,
        value: Any,
        *,
        type: FeedbackType | None = None,
        comment: str | None = None,
        source: FeedbackSource = "user",
        author: str | None = None,
    ) -> Feedback:
        """Judge a completion, or an episode, by its id; without a `type` the value says it."""
        body = GiveFeedback(target=target, metric=metric, value=value, type=type, comment=comment, source=source, author=author)
        return Feedback.model_validate(self._http.post_once("/api/v1/feedback", body.model_dump(exclude_none=True) | {"value": value}))

    def chat(self, model: str, messages: list[dict[str, Any]], *, headers: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
        """One chat completion, as the OpenAI-compatible endpoint answers it."""
        answer: dict[str, Any] = self._http.post("/v1/chat/completions", {"model": model, "messages": messages, **options}, headers=headers)
        return answer

    def chat_stream(
        self, model: str, messages: list[dict[str, Any]], *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion as they come; an error in the middle is raised as what it is, a lost connection as Unavailable."""
        body = {"model": model, "messages": messages, **options, "stream": True}
        with self._http.stream("/v1/chat/completions", body, headers=headers) as lines:
            for line in lines:
                if line == "[DONE]":
                    return
                chunk = json.loads(line)
                if "error" in chunk:
                    raise error_in(chunk["error"])
                yield chunk


class Versions:
    """Published weights: as files, and how faithfully they are sampled."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def files(self, version: str, **choice: Any) -> VersionFiles:
        """What a version (or `tinker://` path) consists of; `choice`: `form` (adapter or merged), `max_shard_bytes`."""
        return VersionFiles.model_validate(self._http.get(_of_version(version, "files"), **choice))

    def download(self, version: str, name: str, target: Path, **choice: Any) -> None:
        """Write one of these files to a new file, with the same choice."""
        self._http.download(f"{_of_version(version, 'files')}/{quote(name, safe='')}", target, **choice)

    def fidelity(self, version: str) -> Fidelity:
        """The card of a version, of a `tinker://` path, or of what a deployment serves now."""
        return Fidelity.model_validate(self._http.get(_of_version(version, "fidelity")))

    def measure_fidelity(self, version: str) -> Fidelity:
        """The same, measured now."""
        answer = self._http.request("POST", _of_version(version, "fidelity"), json={}, repeatable=True, timeout=_MEASURE_S)
        return Fidelity.model_validate(answer.json())

    def card(self, version: str) -> ModelCard:
        """What is known of a version, of a `tinker://` path, or of what a deployment serves now."""
        return ModelCard.model_validate(self._http.get(_of_version(version, "card")))

    def card_text(self, version: str) -> str:
        """The same as Markdown, in the form of Hugging Face's model cards."""
        return self._http.request("GET", _of_version(version, "card"), params={"form": "markdown"}).text


def _of_version(version: str, what: str) -> str:
    return f"/api/v1/versions/{quote(version, safe='')}/{what}"


class Deployments:
    """Served names."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, name: str, version: str, evidence: dict[str, Any] | None = None) -> Deployment:
        """Serve a version under a new name."""
        return self._post("", {"name": name, "version": version, "evidence": evidence or {}})

    def promote(self, name: str, version: str, evidence: dict[str, Any] | None = None) -> Deployment:
        """Make another version the live one."""
        return self._post(f"/{name}/promote", {"version": version, "evidence": evidence or {}})

    def rollback(self, name: str, revision: int) -> Deployment:
        """Make an earlier revision live again."""
        return self._post(f"/{name}/rollback", {"revision": revision})

    def set_price(self, name: str, price: Price | None) -> Deployment:
        """Say what its tokens cost from now on; None: that is not known."""
        return self._post(f"/{name}/price", {"price": None if price is None else price.model_dump()})

    def get(self, name: str) -> Deployment:
        """One deployment with its revisions."""
        return Deployment.model_validate(self._http.get(f"/api/v1/deployments/{name}"))

    def list(self) -> list[Deployment]:
        """All deployments."""
        return [Deployment.model_validate(item) for item in self._http.pages("/api/v1/deployments")]

    def swaps(self, name: str) -> Sequence[Swap]:
        """Every time when another revision became live, the newest first."""
        return [Swap.model_validate(item) for item in self._http.pages(f"/api/v1/deployments/{name}/swaps")]

    def _post(self, path: str, body: dict[str, Any]) -> Deployment:
        return Deployment.model_validate(self._http.post_once(f"/api/v1/deployments{path}", body))


class Spans:
    """Recorded traffic."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def list(
        self, *, kinds: Sequence[SpanKind] = (), limit: int | None = None, order: SpanOrder | None = None, **wanted: Unpack[SpansWanted]
    ) -> list[Span]:
        """Spans without bodies, newest first unless there is another `order`: all that match, or the first `limit` of them."""
        found = self._http.pages("/api/v1/spans", limit=limit, order=order, **wanted, kind=[*kinds] or None)
        return [Span.model_validate(item) for item in found]

    def totals(self, *, kinds: Sequence[SpanKind] = (), **wanted: Unpack[SpansWanted]) -> TrafficReport:
        """What they come to, by the same filters: requests, tokens, time and cost, altogether and of each deployment."""
        return TrafficReport.model_validate(self._http.get("/api/v1/spans/totals", kind=[*kinds] or None, **wanted))

    def get(self, span_id: str) -> SpanDetail:
        """One span with its body and feedback."""
        return SpanDetail.model_validate(self._http.get(f"/api/v1/spans/{span_id}"))


class Keys:
    """API keys of the project; with an admin key of the default project, those of any."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        project: str | None = None,
        ttl_s: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> NewKey:
        """A fresh key: `key` is shown this once. A project that is not there yet is made. The limits are those of the OpenAI contract.

        Conflict when the server made the key and its answer was lost: revoke it and make another.
        """
        body = {"name": name, "scopes": sorted(scopes), "project": project, "ttl_s": ttl_s}
        body |= {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        return NewKey.model_validate(self._http.post_once("/api/v1/keys", body))

    def revoke(self, name: str, *, project: str | None = None) -> Key:
        """Have a key refused from now on. Not repeated where the answer is lost: by then the name may be another key's, so look at `list` first."""
        query = {} if project is None else {"project": project}
        return Key.model_validate(self._http.request("DELETE", f"/api/v1/keys/{quote(name, safe='')}", params=query).json())

    def list(self, *, project: str | None = None) -> list[Key]:
        """Keys without their secrets, oldest first."""
        return [Key.model_validate(item) for item in self._http.pages("/api/v1/keys", project=project)]
