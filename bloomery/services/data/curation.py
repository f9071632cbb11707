"""Training rows from production: recorded answers that consent to training and were judged.

A demonstration becomes the right answer (`correction`); a thumbs-up keeps the model's own (`confirmed`). A thumbs-down without a demonstration
and an answer that nobody judged are dropped. Every stage counts what it dropped. Judgements of an episode hold for its answers, where those
have none of the same metric themselves.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Select, select
from sqlalchemy import Row as DatabaseRow

from bloomery.services.access.principal import Principal
from bloomery.services.data.row import Message, Row
from bloomery.services.data.row_kinds import Broken
from bloomery.services.data.row_kinds import row_of as imported_row
from bloomery.services.data.shingles import NearDuplicates
from bloomery.services.data.span_rows import read_body
from bloomery.services.data.traffic import Traffic
from bloomery.store import rows
from bloomery.store.blobs import AsyncBlobs
from bloomery.store.database import Database
from bloomery.types.datasets import Curate
from bloomery.types.errors import NotFound


class Curated(NamedTuple):
    """Rows in the order of traffic, and how many answers each stage dropped."""

    rows: list[Row]
    counts: dict[str, int]


class Verdict(NamedTuple):
    """What the judgements of one answer come to."""

    kind: Literal["correction", "confirmed", "rejected", "unjudged"]
    answer: str | None = None


class Curation:
    """Reads judged traffic."""

    def __init__(self, database: Database, blobs: AsyncBlobs, traffic: Traffic) -> None:
        self._database = database
        self._blobs = blobs
        self._traffic = traffic

    async def judged(self, p: Principal, choice: Curate) -> Curated:
        """The rows that judged traffic gives, before they are compared with the data set."""
        p.require("train")
        await self._traffic.flush()
        found = await self._database.read(lambda connection: _read(connection, p.project, choice))
        accepted, counts = [], Counter({"traffic.spans": len(found)})
        for span, judgements in found:
            outcome = await self._row(span, verdict_of(judgements, choice.metric))
            counts[f"traffic.{outcome if isinstance(outcome, str) else outcome.label_source}"] += 1
            if isinstance(outcome, Row):
                accepted.append(outcome)
        return Curated(accepted, dict(counts))

    async def _row(self, span: DatabaseRow[Any], verdict: Verdict) -> Row | str:
        """The row, or the name of the stage that drops it."""
        if span.consent != "train":
            return "without_consent"
        if span.status != "ok":
            return "not_ok"
        if verdict.kind not in ("correction", "confirmed"):
            return verdict.kind
        if span.body_ref is None:
            return "without_body"
        return row_of(span.id, read_body(await self._blobs.get(span.body_ref)), verdict)


def verdict_of(judgements: Sequence[DatabaseRow[Any]], metric: str | None) -> Verdict:
    """The latest demonstration counts before any thumb; one thumb down in the latest of each metric rejects."""
    demonstrations = [json.loads(given.value) for given in judgements if given.type == "demonstration" and given.target_kind == "span"]
    if demonstrations:
        return Verdict("correction", demonstrations[-1])
    ordered = sorted(judgements, key=lambda given: given.target_kind == "span")  # an answer's own judgement overrides its episode's
    thumbs = {given.metric: json.loads(given.value) for given in ordered if given.type == "bool" and metric in (None, given.metric)}
    if not thumbs:
        return Verdict("unjudged")
    return Verdict("confirmed" if all(thumbs.values()) else "rejected")


def row_of(span_id: str, body: Mapping[str, Any], verdict: Verdict) -> Row | str:
    """A chat answer as a row, or why it is none."""
    asked = body["request"].get("messages")
    if asked is None:
        return "not_chat"
    answer = verdict.answer
    if verdict.kind == "confirmed":
        if len(body["choices"]) != 1:
            return "several_answers"
        message = body["choices"][0]["message"]
        # Rows are texts: without its calls the answer would be another one.
        answer = None if message.get("tool_calls") else message.get("content")
    messages = [_plain(message) for message in asked]
    spoken: list[Any] = [*messages, {"role": "assistant", "content": answer}]
    # Rows of traffic are texts: what else a message has would be missing when it is served again.
    if any(not isinstance(message, dict) or message.keys() - {"role", "content", "name"} for message in spoken):
        return "not_text"
    try:
        row = imported_row({"messages": spoken}, "chat").row
    except Broken:
        return "not_text"
    return row._replace(label_source="correction" if verdict.kind == "correction" else "confirmed", source_span=span_id)


def curated_rows(judged: Curated, parent: Iterable[Row]) -> Curated:
    """One row per prompt, the latest judged, unless the parent's training rows have its like with the same answer already."""
    latest = {row.prompt: row for row in judged.rows}
    known: dict[str, NearDuplicates] = {}
    for row in parent:
        known.setdefault(row.answer, NearDuplicates()).add(row.prompt)
    fresh = [row for row in latest.values() if row.answer not in known or not known[row.answer].has(row.prompt)]
    stages = {"superseded": len(judged.rows) - len(latest), "known": len(latest) - len(fresh), "accepted": len(fresh)}
    return Curated(fresh, judged.counts | {f"traffic.{stage}": count for stage, count in stages.items()})


def _plain(message: Mapping[str, Any]) -> Message | Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


def _read(connection: Connection, project: str, choice: Curate) -> list[tuple[DatabaseRow[Any], list[DatabaseRow[Any]]]]:
    served = select(rows.deployment.c.id).where(rows.deployment.c.project == project, rows.deployment.c.name == choice.deployment)
    if choice.deployment is not None and connection.execute(served).first() is None:
        raise NotFound(f"no deployment `{choice.deployment}`", field="deployment")
    chosen = _chosen(project, choice)
    by_target: dict[str, list[DatabaseRow[Any]]] = {}
    for given in connection.execute(_feedback(project, chosen)):
        by_target.setdefault(given.target_id, []).append(given)
    spans: Iterable[DatabaseRow[Any]] = connection.execute(chosen.order_by(rows.span.c.started_us, rows.span.c.id))
    return [(span, by_target.get(span.episode_id, []) + by_target.get(span.id, [])) for span in spans]


def _chosen(project: str, choice: Curate) -> Select[Any]:
    span = rows.span.c
    query = select(span.id, span.episode_id, span.consent, span.status, span.body_ref)
    # Samples of training were no answers to anybody.
    query = query.where(span.project == project, span.kind.in_(("chat", "completion")))
    if choice.deployment is not None:
        served = select(rows.deployment.c.id).where(rows.deployment.c.project == project, rows.deployment.c.name == choice.deployment)
        query = query.where(span.deployment_id.in_(served))
    if choice.since_us is not None:
        query = query.where(span.started_us >= choice.since_us)
    return query if choice.until_us is None else query.where(span.started_us < choice.until_us)


def _feedback(project: str, chosen: Select[Any]) -> Select[Any]:
    spans = chosen.subquery()
    about = rows.feedback.c.target_id.in_(select(spans.c.id)) | rows.feedback.c.target_id.in_(select(spans.c.episode_id))
    order = (rows.feedback.c.created_us, rows.feedback.c.id)
    return select(rows.feedback).where(rows.feedback.c.project == project, about).order_by(*order)
