"""Rollouts as they were served: token ids, log-probabilities of the distribution drawn from, and the version of the weights.

A `Sampler` begins samples and returns at once; a `PendingSample` is one to come. A seed decides every token, so a sample that the server lost in a
restart is asked for again and is the same one. They speak the Training API's routes (`docs/tinker.md`), where one request is one version.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple

from bloomery.client.http import Http
from bloomery.client.sample_message import Likeliest, SampleAnswer, SampledSequence, read_answer
from bloomery.types.drafted import KEPT_HEADER
from bloomery.types.errors import BloomeryError, Gone, InvalidInput, Unavailable, WorkerError
from bloomery.types.generation import SCORED_TEMPERATURE_HEADER

_HOLD_S: Final = 20.0
"""How long the server holds a question for a result."""
_TIMEOUT_S: Final = 600.0
_PROTOBUF: Final = "application/x-protobuf"
_CANCEL_S: Final = 1.0
"""Patience to have a sample stopped that nobody waits for: without it, it ends by itself."""


class Sampled(NamedTuple):
    """The continuations of one prompt and the weights that gave them."""

    version: str
    sequences: tuple[SampledSequence, ...]
    kept: tuple[int, ...] = ()
    """Where there were drafts: the leading tokens of each continuation that its draft had right."""


class Scored(NamedTuple):
    """Of each token of a text under some weights; the first has nothing before it, and NaN."""

    logprobs: tuple[float, ...]
    likeliest: tuple[Likeliest, ...]
    """What would have been the likeliest there; empty unless it was asked for."""


class SamplingSession:
    """What the samplers of a client have in common; begun when the first of them samples."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._lock = threading.Lock()
        self._id: str | None = None
        self._numbers = count()

    def begin_sampler(self, model: str) -> str:
        """The id of a new sampler."""
        with self._lock:
            if self._id is None:
                body = {"sdk_version": "bloomery", "tags": []}
                self._id = str(self._http.post("/api/v1/create_session", body, repeatable=True)["session_id"])
            number = next(self._numbers)
        asked = {"session_id": self._id, "sampling_session_seq_id": number, "model_path": model}
        return str(self._http.post("/api/v1/create_sampling_session", asked, repeatable=True)["sampling_session_id"])


class Sampler:
    """One version of weights, as a source of rollouts. Threads may share it."""

    def __init__(self, http: Http, session: SamplingSession, model: str) -> None:
        self.model = model
        self._http = http
        self._id = session.begin_sampler(model)
        self._numbers = count()

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> "PendingSample":
        """Begin `num_samples` continuations of a prompt; `stop` replaces the model's own end tokens, and an empty one means none.

        `drafts` are a guess at each, such as what other weights gave with this seed: they change no token, and save the time of those that are right.
        """
        params = {"max_tokens": max_tokens, "seed": seed, "temperature": temperature, "top_p": top_p}
        stops = {} if stop is None else {"stop": list(stop)}
        if drafts is None:
            return self._begin(prompt, {"num_samples": num_samples, "sampling_params": params | stops | {"top_k": top_k or -1}})
        if len(drafts) != num_samples:
            message = f"`drafts` are {len(drafts)} for {num_samples} samples: give one for each, an empty one where there is none"
            raise InvalidInput(message, field="drafts")
        asked = {"prompt": list(prompt), "drafts": [list(draft) for draft in drafts], "top_k": top_k, **params, **stops}
        return PendingSample(self._http, {"sampling_session_id": self._id, "seq_id": next(self._numbers), **asked}, "/api/v1/samples")

    def score(self, tokens: Sequence[int], *, likeliest: bool = False, temperature: float = 1.0) -> "PendingSample":
        """Begin to score a text: `prompt_logprobs` of the result are those of these weights at a temperature, NaN at the first token.

        With `likeliest` its `scored` also tells the token that is the likeliest at each place.
        """
        asked = {"prompt_logprobs": True, "sampling_params": {"max_tokens": 0, "seed": 0}}
        headers = None if temperature == 1 else {SCORED_TEMPERATURE_HEADER: repr(temperature)}
        return self._begin(tokens, asked | ({"topk_prompt_logprobs": 1} if likeliest else {}), headers)

    def _begin(self, tokens: Sequence[int], asked: dict[str, Any], headers: Mapping[str, str] | None = None) -> "PendingSample":
        # Counting is atomic: the number of a sample is its name, and no two may share one.
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        asked = {"sampling_session_id": self._id, "seq_id": next(self._numbers), "prompt": prompt, **asked}
        return PendingSample(self._http, asked, headers=headers)


class PendingSample:
    """A sample to come."""

    def __init__(self, http: Http, asked: dict[str, Any], route: str = "/api/v1/asample", headers: Mapping[str, str] | None = None) -> None:
        self._http = http
        self._asked, self._route, self._headers = asked, route, headers
        self._answer: _Answer | None = None
        self._request_id = self._submit(None)

    def result(self, timeout_s: float = _TIMEOUT_S) -> Sampled:
        """Wait for it; one that is not there in time is cancelled, and Unavailable."""
        version, answer, kept = self._wait(timeout_s)
        return Sampled(version, answer.sequences, kept)

    def prompt_logprobs(self, timeout_s: float = _TIMEOUT_S) -> tuple[float, ...]:
        """The same, of what was scored: one log-probability for each token."""
        return self._wait(timeout_s).answer.prompt_logprobs

    def scored(self, timeout_s: float = _TIMEOUT_S) -> "Scored":
        """The same with the likeliest tokens, where those were asked for."""
        answer = self._wait(timeout_s).answer
        return Scored(answer.prompt_logprobs, answer.likeliest)

    def cancel(self) -> None:
        """Have it stopped; one that is over, or whose server is away, needs no stopping."""
        with suppress(BloomeryError):
            self._http.request("POST", "/api/v1/cancel_future", json={"request_id": self._request_id}, patience_s=_CANCEL_S, timeout=_CANCEL_S)

    def _submit(self, patience_s: float | None) -> str:
        answer = self._http.request("POST", self._route, repeatable=True, paced=True, patience_s=patience_s, json=self._asked, headers=self._headers)
        return str(answer.json()["request_id"])

    def _wait(self, timeout_s: float) -> "_Answer":
        deadline = time.monotonic() + timeout_s
        while self._answer is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.cancel()
                raise Unavailable(f"sample `{self._request_id}` was not there within {timeout_s:g} s and is cancelled; ask again, or wait longer")
            try:
                self._answer = self._poll(deadline)
            except Gone:
                # A restart of the server forgets samples in the making; the seed gives the same one again.
                self._request_id = self._submit(left_s)
        return self._answer

    def _poll(self, deadline: float) -> "_Answer | None":
        """The answer, or None while the sample is in the making."""
        left_s = max(0.0, deadline - time.monotonic())
        try:
            response = self._http.request(
                "POST",
                "/api/v1/retrieve_future",
                repeatable=True,
                paced=True,
                also=(408,),
                patience_s=left_s,
                json={"request_id": self._request_id},
                timeout=min(left_s, _HOLD_S + 10),
            )
        except Unavailable:
            if time.monotonic() < deadline:
                raise
            # The question is held for longer than was left.
            return None
        if response.status_code == 408:
            return None
        if response.headers.get("content-type") != _PROTOBUF:
            failed = response.json()
            raise (InvalidInput if failed["category"] == "user" else WorkerError)(failed["error"])
        kept = response.headers.get(KEPT_HEADER)
        return _Answer(response.headers["x-bloomery-version"], read_answer(response.content), tuple(map(int, kept.split(","))) if kept else ())


class _Answer(NamedTuple):
    version: str
    answer: SampleAnswer
    kept: tuple[int, ...]
