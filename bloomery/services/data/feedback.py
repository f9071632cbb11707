"""Judgements of completions and episodes: append-only, the latest of a metric wins.

What is measured under one metric of a project (`MEASURED`) is of one type, or the latest could not be compared with those before it. Comments,
demonstrations and preferences may stand beside it under the same name: they explain a judgement and are never counted as one.

A target may have been answered a moment ago, so whatever is queued for recording is written before a target is looked up.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, insert, select

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable, answer_before, once
from bloomery.services.data.redaction import pseudonym, redact, redact_text
from bloomery.services.data.traffic import Traffic
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.ids import new_id, now_us
from bloomery.types.resources import Feedback, FeedbackType, GiveFeedback, Page

MAX_VALUE_CHARS: Final = 65_536
MEASURED: Final[tuple[FeedbackType, ...]] = ("bool", "float", "label")
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Judgements:
    """Takes and shows feedback."""

    def __init__(self, database: Database, traffic: Traffic) -> None:
        self._database = database
        self._traffic = traffic

    async def give(self, p: Principal, given: GiveFeedback, *, request: Repeatable | None = None) -> Feedback:
        """Store a judgement; NotFound when nothing of that id was recorded. A `request` that comes again is answered what it was."""
        p.require("infer")
        if (made := await answer_before(self._database, p, request, Feedback)) is not None:
            return made
        if self._traffic.mode == "off":
            raise Conflict("this server records no traffic, so there is nothing to judge: start it with `--record full`", field="target")
        kind = given.type or _natural_type(given.value)
        _check(kind, given)
        await self._traffic.flush()
        row = {
            "id": new_id("feedback"),
            "project": p.project,
            "metric": given.metric,
            "type": kind,
            "value": json.dumps(redact(given.value).value),
            "comment": None if given.comment is None else redact_text(given.comment),
            "source": given.source,
            "author": None if given.author is None else pseudonym(given.author),
            "judge_version": None,
            "created_us": now_us(),
        }
        return await self._database.write(once(p, request, Feedback, lambda connection: _append(connection, row, given)))

    async def list(self, p: Principal, *, target: str | None = None, limit: int = 50, offset: int = 0) -> Page[Feedback]:
        """Judgements, newest first."""
        p.require("read")
        table = rows.feedback.c
        query = select(rows.feedback).where(table.project == p.project).order_by(table.created_us.desc(), table.id.desc())
        if target is not None:
            query = query.where(table.target_id.in_([target, pseudonym(target)]))
        found = await self._database.read(lambda connection: connection.execute(query.limit(limit + 1).offset(offset)).all())
        return Page(data=[feedback_of(row) for row in found[:limit]], offset=offset, has_more=len(found) > limit)


def feedback_of(row: Row[Any]) -> Feedback:
    """The resource of a row."""
    fields = {name: value for name, value in row._mapping.items() if name in Feedback.model_fields}
    return Feedback.model_validate({**fields, "target": row.target_id, "value": json.loads(row.value)})


class _Rule(NamedTuple):
    """What the values of a type must be."""

    holds: Callable[[Any], bool]
    otherwise: str


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_RULES: Final[dict[FeedbackType, _Rule]] = {
    "bool": _Rule(lambda value: isinstance(value, bool), "true or false"),
    "float": _Rule(_is_number, "a finite number"),
    "label": _Rule(_is_text, "a text that is not empty"),
    "comment": _Rule(_is_text, "a text that is not empty"),
    "demonstration": _Rule(_is_text, "the text that would have been the right answer"),
    "preference": _Rule(_is_text, "the id of the completion that the target is preferred to"),
}


def _natural_type(value: Any) -> FeedbackType:
    if isinstance(value, bool):
        return "bool"
    return "float" if _is_number(value) else "label"


def _check(kind: FeedbackType, given: GiveFeedback) -> None:
    rule = _RULES[kind]
    if not rule.holds(given.value):
        raise InvalidInput(f"the value of feedback of type `{kind}` is {rule.otherwise}", field="value")
    if isinstance(given.value, str) and len(given.value) > MAX_VALUE_CHARS:
        raise InvalidInput(f"a value has at most {MAX_VALUE_CHARS} characters, this one has {len(given.value)}", field="value")
    if isinstance(given.value, str) and _LONE_SURROGATE.search(given.value):
        raise InvalidInput("half a surrogate pair is not text", field="value")


def _append(connection: Connection, row: dict[str, Any], given: GiveFeedback) -> Feedback:
    kind, target = _find(connection, row["project"], given.target, field="target")
    if row["type"] == "preference":
        _find(connection, row["project"], given.value, field="value")
    if row["type"] in MEASURED:
        _check_metric(connection, row)
    stored = row | {"target_kind": kind, "target_id": target}
    connection.execute(insert(rows.feedback), stored)
    return feedback_of(connection.execute(select(rows.feedback).where(rows.feedback.c.id == row["id"])).one())


def _check_metric(connection: Connection, row: dict[str, Any]) -> None:
    table = rows.feedback.c
    same = select(table.type).where(table.project == row["project"], table.metric == row["metric"], table.type.in_(MEASURED))
    known = connection.execute(same.order_by(table.created_us.desc()).limit(1)).scalar_one_or_none()
    if known not in (None, row["type"]):
        raise InvalidInput(
            f"the values of metric `{row['metric']}` are of type `{known}` so far ({_RULES[known].otherwise}) and this one is a `{row['type']}`: "
            "give one of that type, or judge under another metric's name",
            field="value",
        )


def _find(connection: Connection, project: str, target: str, *, field: str) -> tuple[str, str]:
    span = rows.span.c
    if connection.execute(select(span.id).where(span.project == project, span.id == target)).first():
        return "span", target
    episode = pseudonym(target)
    if connection.execute(select(span.id).where(span.project == project, span.episode_id == episode).limit(1)).first():
        return "episode", episode
    raise NotFound(f"no completion or episode `{target}` was recorded: was it answered by this server, recorded, and not yet expired?", field=field)
