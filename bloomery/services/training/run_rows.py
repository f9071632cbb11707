"""Rows of runs, as values."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row, Select, func, insert, select

from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable
from bloomery.services.kinds import ACTIVE, COPY
from bloomery.services.one_row import one_row
from bloomery.services.training.history import RunFacts
from bloomery.store import rows
from bloomery.types.errors import Conflict
from bloomery.types.ids import now_us
from bloomery.types.operations import LoraSpec, RunSpec
from bloomery.types.resources import Run

TINKER = "tinker"
REQUEST = "request"
"""The contract of names that callers give to requests of their own, so that a repetition is known."""


class RunRow(NamedTuple):
    """One run. `next_seq` is the number that its next operation takes, `tinker_id` the name that the tinker contract has for it."""

    id: str
    project: str
    name: str | None
    session_id: str | None
    tinker_id: str | None
    base_model: str
    base_hash: str
    lora: LoraSpec
    micro_batch_tokens: int
    metadata: Mapping[str, str]
    state: str
    error: str | None
    first_seq: int
    settled_seq: int
    next_seq: int
    step: int
    digest: str | None
    """Of the weights at the latest checkpoint."""
    created_us: int
    updated_us: int

    @property
    def facts(self) -> RunFacts:
        """What an engine must know."""
        spec = RunSpec(run_id=self.id, base_hash=self.base_hash, lora=self.lora, micro_batch_tokens=self.micro_batch_tokens)
        return RunFacts(self.project, spec, self.first_seq)

    def shown(self) -> Run:
        """As `/api/v1` shows it."""
        names = ("id", "name", "base_model", "base_hash", "state", "error", "step", "digest", "next_seq", "created_us", "updated_us")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Run(**values, **msgspec.structs.asdict(self.lora), metadata=dict(self.metadata))


class RunPage(NamedTuple):
    """Some of all runs, newest first."""

    runs: list[RunRow]
    total: int


class NewRun(NamedTuple):
    """What a run is created from."""

    id: str
    base_model: str
    base_hash: str
    lora: LoraSpec
    micro_batch_tokens: int
    metadata: Mapping[str, str]
    name: str | None
    session_id: str | None
    tinker_id: str | None
    first_seq: int


def add_run(connection: Connection, project: str, new: NewRun, state: str = ACTIVE, *, request: Repeatable | None = None, asked: bytes = b"") -> str:
    """Insert a run; asked again under the same tinker id or in the same request, the run that is there. Returns the id.

    `asked`: the hash of what asks for the tinker id, where its repetition is to be the same.
    """
    now = now_us()
    if request is not None and (made := run_of_request(connection, project, request)) is not None:
        return made
    if new.tinker_id is not None:
        table = rows.alias.c
        joined = rows.alias.join(rows.run, table.target_id == rows.run.c.id)
        named = (table.project == project, table.contract == TINKER, table.name == new.tinker_id)
        found = select(rows.run.c.id, rows.run.c.state, table.request_hash).select_from(joined).where(*named)
        if (known := connection.execute(found).one_or_none()) is not None:
            if (known.state == COPY) != (state == COPY):
                raise Conflict(f"`{new.tinker_id}` is taken: number your runs and copies one after the other", field="model_seq_id")
            if asked and known.request_hash and known.request_hash != asked.hex():
                what = f"`{new.tinker_id}` was created with another body"
                raise Conflict(f"{what}: repeat that body, or give a new run the next number", field="model_seq_id")
            return str(known.id)
        _name(connection, project, TINKER, new.tinker_id, new.id, **({"request_hash": asked.hex()} if asked else {}))
    if request is not None:
        _name(connection, project, REQUEST, request.key, new.id, request_hash=request.hash)
    values = {name: value for name, value in new._asdict().items() if name not in ("lora", "metadata", "tinker_id")}
    values |= {"lora": msgspec.json.encode(new.lora).decode(), "metadata": json.dumps(dict(new.metadata))}
    values |= {"project": project, "state": state, "settled_seq": new.first_seq - 1, "step": 0, "created_us": now, "updated_us": now}
    connection.execute(insert(rows.run).values(values))
    return new.id


def _name(connection: Connection, project: str, contract: str, name: str, run_id: str, **more: str) -> None:
    alias = {"project": project, "contract": contract, "name": name, "kind": "run", "target_id": run_id, "created_us": now_us()}
    connection.execute(insert(rows.alias).values(alias | more))


def run_of_request(connection: Connection, project: str, request: Repeatable) -> str | None:
    """The run that the request made when it came before."""
    table = rows.alias.c
    query = select(table.target_id, table.request_hash).where(table.project == project, table.contract == REQUEST, table.name == request.key)
    if (known := connection.execute(query).one_or_none()) is None:
        return None
    if known.request_hash != request.hash:
        what = f"run `{known.target_id}` was created with this idempotency key and another body"
        raise Conflict(f"{what}: repeat that body, or give a new request a new key", field=request.header)
    request.on_replay()
    return str(known.target_id)


def one_run(connection: Connection, p: Principal | None, run_id: str) -> RunRow:
    """A run by its id or its tinker id; without a principal, of any project."""
    query = _runs().where((rows.run.c.id == run_id) | (rows.alias.c.name == run_id))
    if p is not None:
        query = query.where(rows.run.c.project == p.project)
    row = one_row(connection, query, f"run `{run_id}`", field="run_id")
    return _run(row)


def all_runs(connection: Connection) -> list[RunRow]:
    """Every run of every project."""
    return [_run(row) for row in connection.execute(_runs())]


def page_of_runs(connection: Connection, p: Principal, *, session_id: str | None, limit: int, offset: int) -> RunPage:
    """Runs of a project, newest first."""
    conditions = [rows.run.c.project == p.project]
    if session_id is not None:
        conditions.append(rows.run.c.session_id == session_id)
    total = connection.scalar(select(func.count()).select_from(rows.run).where(*conditions))
    query = _runs().where(*conditions).order_by(rows.run.c.created_us.desc(), rows.run.c.id.desc()).limit(limit).offset(offset)
    return RunPage([_run(row) for row in connection.execute(query)], total or 0)


def _runs() -> Select[Any]:
    alias = rows.alias
    named = (alias.c.target_id == rows.run.c.id) & (alias.c.contract == TINKER) & (alias.c.kind == "run") & (alias.c.project == rows.run.c.project)
    return select(rows.run, alias.c.name.label("tinker_id")).select_from(rows.run.outerjoin(alias, named))


def _run(row: Row[Any]) -> RunRow:
    return RunRow(
        id=row.id,
        project=row.project,
        name=row.name,
        session_id=row.session_id,
        tinker_id=row.tinker_id,
        base_model=row.base_model,
        base_hash=row.base_hash,
        lora=msgspec.json.decode(row.lora, type=LoraSpec),
        micro_batch_tokens=row.micro_batch_tokens,
        metadata=json.loads(row.metadata),
        state=row.state,
        error=row.error,
        first_seq=row.first_seq,
        settled_seq=row.settled_seq,
        next_seq=row.settled_seq + 1,
        step=row.step,
        digest=row.digest,
        created_us=row.created_us,
        updated_us=row.updated_us,
    )
