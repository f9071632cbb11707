"""Managed jobs: made, watched and steered; and what runners and the processes of jobs say."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from bloomery.client.http import Http
from bloomery.types.errors import Unavailable
from bloomery.types.estimates import JobEstimate, Prices
from bloomery.types.jobs import Chain, CreateChain, Job, JobEvent, JobPoint, JobPoints, JobSpec, JobState
from bloomery.types.keys import new_key
from bloomery.types.leases import Claimed, EndedJob, FinishJob, FollowedJob, FollowedJobs, Lease, Released, Reported, ReportJob
from bloomery.types.model_cards import ModelCard

_LOOK_EVERY_S: Final = 1.0
_CLAIM_EXTRA_S: Final = 30.0


class Jobs:
    """Jobs of the project."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, spec: JobSpec) -> Job:
        """A job, which waits for a process."""
        return self._post("", spec.model_dump(mode="json"))

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The spec as a job would have it, or what is wrong with it; nothing is made."""
        return JobSpec.model_validate(self._http.post("/api/v1/jobs/resolve", spec.model_dump(mode="json"), repeatable=True))

    def estimate(self, spec: JobSpec, **prices: float | None) -> JobEstimate:
        """What a job would take, or what is wrong with it; nothing is made. `prices`: `tokens_per_s`, `price_per_million`, `price_per_hour`."""
        asked = spec.model_dump(mode="json")
        known = Prices(**prices).model_dump(exclude_none=True)
        answer = self._http.request("POST", "/api/v1/jobs/estimate", json=asked, params=known, repeatable=True)
        return JobEstimate.model_validate(answer.json())

    def create_chain(self, stages: Sequence[JobSpec]) -> list[Job]:
        """Jobs of which each begins where one before it ends: all of them are made, or none."""
        body = CreateChain(stages=[*stages]).model_dump(mode="json")
        return Chain.model_validate(self._http.post_once("/api/v1/chains", body)).jobs

    def resolve_chain(self, stages: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The specs as the jobs would have them, or what is wrong with one; nothing is made."""
        body = CreateChain(stages=[*stages]).model_dump(mode="json")
        return CreateChain.model_validate(self._http.post("/api/v1/chains/resolve", body, repeatable=True)).stages

    def get(self, job: str) -> Job:
        """One job, by its id or name."""
        return Job.model_validate(self._http.get(f"/api/v1/jobs{_of(job)}"))

    def points(self, job: str, *, after: int = -1) -> list[JobPoint]:
        """What was measured behind step `after`, in order."""
        found: list[JobPoint] = []
        while page := JobPoints.model_validate(self._http.get(f"/api/v1/jobs{_of(job)}/points", after=after)).data:
            found += page
            after = page[-1].step
        return found

    def events(self, job: str) -> list[JobEvent]:
        """What happened to it, oldest first."""
        return [JobEvent.model_validate(item) for item in self._http.pages(f"/api/v1/jobs{_of(job)}/events")]

    def card(self, job: str) -> ModelCard:
        """What is known of the model that came of it."""
        return ModelCard.model_validate(self._http.get(f"/api/v1/jobs{_of(job)}/card"))

    def card_text(self, job: str) -> str:
        """The same as Markdown, in the form of Hugging Face's model cards."""
        return self._http.request("GET", f"/api/v1/jobs{_of(job)}/card", params={"form": "markdown"}).text

    def pause(self, job: str) -> Job:
        """Have it stand still, within seconds."""
        return self._post(f"{_of(job)}/pause", {})

    def resume(self, job: str) -> Job:
        """Have it go on where it was."""
        return self._post(f"{_of(job)}/resume", {})

    def cancel(self, job: str) -> Job:
        """End it without a result."""
        return self._post(f"{_of(job)}/cancel", {})

    def wait(self, job: str, timeout_s: float = 86_400.0, *, on_change: Callable[[Job], None] = lambda _: None) -> Job:
        """The job once it has ended, or stands still; `on_change` is told whenever something of it changed."""
        deadline, last = time.monotonic() + timeout_s, None
        while True:
            now = self.get(job)
            if now != last:
                on_change(now)
            if now.state.ended or now.state is JobState.PAUSED:
                return now
            if time.monotonic() > deadline:
                raise Unavailable(f"job `{now.spec.name}` is still {now.state} after {timeout_s:g} s: wait for longer")
            last = now
            time.sleep(_LOOK_EVERY_S)

    def list(self, *, state: JobState | None = None, after: str | None = None, limit: int | None = None) -> list[Job]:
        """Jobs, newest first: all, or the newest `limit`; of those alone that begin where the job `after` ends."""
        return [Job.model_validate(item) for item in self._http.pages("/api/v1/jobs", state=state, after=after, limit=limit)]

    def _post(self, path: str, body: dict[str, Any]) -> Job:
        return Job.model_validate(self._http.post_once(f"/api/v1/jobs{path}", body))


class Working:
    """What the process of a job says of it."""

    def __init__(self, http: Http, job: str) -> None:
        self._http, self._job = http, job

    def report(self, said: ReportJob) -> Reported:
        """What it did, and that it lives."""
        return Reported.model_validate(self._http.post(f"/api/v1/jobs{_of(self._job)}/report", said.model_dump(mode="json"), repeatable=True))

    def finish(self, said: FinishJob) -> None:
        """How it ended. Not repeated where the answer is lost: by then the key is refused, and a job that was not told of it begins again here."""
        self._http.post(f"/api/v1/jobs{_of(self._job)}/finish", said.model_dump(mode="json"))


class Runner:
    """What a runner of jobs asks for and says; its key administers the server."""

    def __init__(self, http: Http, name: str) -> None:
        self._http, self.name = http, name

    def claim(self, wait_s: float) -> Lease | None:
        """A job that waits, if there is one in time."""
        # Whoever chooses the key is given the same job again where the answer was lost with the server.
        body = {"runner": self.name, "wait_s": wait_s, "token": new_key()}
        answer = self._http.request("POST", "/api/v1/runners/claim", json=body, repeatable=True, timeout=wait_s + _CLAIM_EXTRA_S)
        return Claimed.model_validate(answer.json()).lease

    def release(self) -> list[str]:
        """None of its processes lives any more."""
        return Released.model_validate(self._http.post("/api/v1/runners/release", {"runner": self.name}, repeatable=True)).jobs

    def changed(self, since_us: int) -> list[FollowedJob]:
        """Jobs of all projects that changed then or later, in the order in which they did; the first of them where there are many."""
        return FollowedJobs.model_validate(self._http.get("/api/v1/runners/jobs", since_us=since_us)).data

    def points(self, job: str, *, since_us: int) -> list[JobPoint]:
        """What a job of any project was told to have measured after that, in the order in which it was; the first of it where it is much."""
        return JobPoints.model_validate(self._http.get(f"/api/v1/runners/jobs{_of(job)}/points", since_us=since_us)).data

    def ended(self, job: str, epoch: int, words: str) -> Job:
        """A process ended, and how."""
        said = EndedJob(epoch=epoch, words=words)
        return Job.model_validate(self._http.post(f"/api/v1/runners/ended{_of(job)}", said.model_dump(), repeatable=True))


def _of(job: str) -> str:
    return f"/{quote(job, safe='')}"
