"""Which recorded spans are meant, as values and as conditions of a query."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, literal_column, select
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from bloomery.services.data.redaction import pseudonym
from bloomery.store import rows
from bloomery.types.traffic import SpanKind, SpanStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanFilter:
    """Which spans are meant: those to which all of it applies."""

    deployment: str | None = None
    base: str | None = None
    """The hash of a base model that was asked itself, and through no deployment."""
    episode: str | None = None
    kinds: Sequence[SpanKind] = ()
    """Any where it is empty."""
    status: SpanStatus | None = None
    version: str | None = None
    """Of the weights."""
    since_us: int | None = None
    until_us: int | None = None
    min_cost_usd: float | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether an index finds so few that these are better put in order than looked for among all in that order."""
        return (self.deployment, self.base, self.episode, self.version) != (None, None, None, None)


Columns = ReadOnlyColumnCollection[str, Any]
_Said = list[tuple[Any, Callable[[Any], ColumnElement[bool]]]]


def of_spans(project: str, wanted: SpanFilter) -> list[ColumnElement[bool]]:
    """What holds for the spans of a project that are meant."""
    span = rows.span.c
    said: _Said = [
        (wanted.episode, lambda episode: span.episode_id == pseudonym(episode)),
        (wanted.since_us, lambda since_us: span.started_us >= since_us),
        (wanted.until_us, lambda until_us: span.started_us < until_us),
        (wanted.min_cost_usd, lambda least: span.cost_usd >= least),
    ]
    # Partial indexes are for what is known of a query, whatever its values.
    if wanted.kinds and "sample" not in wanted.kinds:
        said.append((literal_column("'sample'"), lambda sample: span.kind != sample))
    if wanted.status is not None and wanted.status != "ok":
        said.append((literal_column("'ok'"), lambda ok: span.status != ok))
    return [*what_is_summed(project, wanted, span), *_holds(said)]


def what_is_summed(project: str, wanted: SpanFilter, columns: Columns) -> list[ColumnElement[bool]]:
    """What of it holds for the sums of spans, too: for whichever has these columns."""
    said: _Said = [
        (project, lambda project: columns.project == project),
        (wanted.deployment, lambda name: columns.deployment_id == _deployment(project, name)),
        # Its own weights are the version that has its hash. Spans have no deployment then, and sums an empty one.
        (wanted.base, lambda base: and_(columns.version == base, func.coalesce(columns.deployment_id, "") == "")),
        (wanted.kinds or None, columns.kind.in_),
        (wanted.status, lambda status: columns.status == status),
        (wanted.version, lambda version: columns.version == version),
    ]
    return _holds(said)


def _holds(said: _Said) -> list[ColumnElement[bool]]:
    return [condition(value) for value, condition in said if value is not None]


def _deployment(project: str, name: str) -> Any:
    """Its id, which indexes of spans have."""
    return select(rows.deployment.c.id).where(rows.deployment.c.project == project, rows.deployment.c.name == name).scalar_subquery()
