"""Training runs: created, driven by numbered operations, asked for results.

An operation is checked here and journaled by its run (`activity` knows those in use). One that cannot be done still takes its place in the order,
as a `Rejected` that fails with the reason; only what has no place at all raises.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from bloomery.obs.failpoints import failpoint
from bloomery.services.access.principal import Principal
from bloomery.services.access.repeats import Repeatable
from bloomery.services.engines.models import Models, Size
from bloomery.services.kinds import COPY, EXTERNAL, NAMED, SNAPSHOT, SOURCE
from bloomery.services.threads import off_loop
from bloomery.services.training.active import ActiveRun
from bloomery.services.training.activity import Activity
from bloomery.services.training.checkpoints import Announcement, CheckpointRow, Checkpoints, check_name, check_ttl, new_key
from bloomery.services.training.history import Make
from bloomery.services.training.run_rows import NewRun, RunPage, RunRow, add_run, one_run, page_of_runs, run_of_request
from bloomery.services.training.validate import check_labels, check_lora
from bloomery.store.database import Database
from bloomery.types.batching import micro_batch_tokens
from bloomery.types.checks import check_adam, check_forward_backward
from bloomery.types.errors import Conflict, InvalidInput, NotFound
from bloomery.types.ids import new_id
from bloomery.types.operations import (
    Effect,
    ForwardBackward,
    LoadCheckpoint,
    LoraSpec,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveCheckpoint,
    SaveSnapshot,
)

ROWS_S: Final = 5.0
"""Whoever looks at a run waits no longer for its rows; where the disk is full they come later."""


class Runs:
    """The verbs of runs; every look-up is confined to the caller's project."""

    def __init__(self, *, database: Database, models: Models, checkpoints: Checkpoints, activity: Activity) -> None:
        self._database, self._models, self._checkpoints, self._activity = database, models, checkpoints, activity
        self._ids: dict[tuple[str, str], str] = {}
        """Of runs by project and the name they were asked for."""

    # Runs

    async def create(
        self,
        p: Principal,
        *,
        base_model: str,
        lora: LoraSpec,
        metadata: Mapping[str, str],
        name: str | None = None,
        session_id: str | None = None,
        tinker_id: str | None = None,
        request: Repeatable | None = None,
        begins_with_load: bool = False,
        asked: bytes = b"",
    ) -> RunRow:
        """A new run, or the one that has this `tinker_id` already or that this `request` made before.

        `asked`: the hash of what asks for a `tinker_id`; another one for the same id is a `Conflict`.
        With `begins_with_load` its history begins with operation 0, else with 1.
        """
        p.require("train")
        base = self._models.resolve(base_model)
        check_lora(lora)
        check_labels(name, metadata)
        if lora.rank == 0 and not await self._known(p, tinker_id, request):
            self._models.check_room(base.base_hash, lora)
        new = NewRun(
            id=new_id("run"),
            base_model=base_model,
            base_hash=base.base_hash,
            lora=lora,
            micro_batch_tokens=micro_batch_tokens(self._models.size(base.base_hash).width, rank=lora.rank),
            metadata=metadata,
            name=name,
            session_id=session_id,
            tinker_id=tinker_id,
            first_seq=0 if begins_with_load else 1,
        )
        run_id = await self._database.write(lambda connection: add_run(connection, p.project, new, request=request, asked=asked))
        failpoint("run.created")
        (await self._activity.take_up(run_id)).want()
        return await self.get(p, run_id)

    async def get(self, p: Principal, run_id: str) -> RunRow:
        """One run, by its id or its tinker id, as the results that were told left it."""
        p.require("read", "train")
        row = await self._database.read(lambda connection: one_run(connection, p, run_id))
        active = self._activity.get(row.id)
        if active is not None and active.history.unsettled:
            await active.rows_follow(ROWS_S)
            row = await self._database.read(lambda connection: one_run(connection, p, run_id))
        return self._live(row)

    async def list(self, p: Principal, *, limit: int = 50, offset: int = 0, session_id: str | None = None) -> RunPage:
        """Runs, newest first."""
        p.require("read", "train")
        page = await self._database.read(lambda connection: page_of_runs(connection, p, session_id=session_id, limit=limit, offset=offset))
        return RunPage([self._live(row) for row in page.runs], page.total)

    async def unload(self, p: Principal, run_id: str) -> None:
        """Have the engine checkpoint the run and let it go; the next operation brings it back."""
        p.require("train")
        run = await self._find(p, run_id)
        if not run.idle:
            raise Conflict(f"run `{run_id}` has operations without a result: wait for them first", field="run_id")
        await self._activity.retire(run)

    # Operations

    async def submit(self, p: Principal, run_id: str, seq: int, operation: Operation, *, request: bytes = b"") -> None:
        """Journal a computation or an optimizer step. One that cannot be done takes its place in the order and fails with a user error.

        `request` here and below: the hash of what asks for it. Asked again, nothing happens; another one under the same number is a `Conflict`.
        A contract that cannot make sense of a numbered request submits `Rejected`, so that the run's later operations need not wait for it.
        """
        p.require("train")
        if not isinstance(operation, ForwardBackward | OptimStep | Rejected):
            kind = type(operation).__struct_config__.tag
            raise InvalidInput(f"`{kind}` is not submitted as such: save and load by name", field="operation")
        run = await self._trainable(p, run_id)

        async def make() -> Operation:
            if isinstance(operation, OptimStep):
                check_adam(operation.adam)
            elif isinstance(operation, ForwardBackward):
                await off_loop(operation.input_bytes, check_forward_backward, operation, self._models.size(run.facts.spec.base_hash))
            return operation

        learns = isinstance(operation, ForwardBackward) and operation.backward
        await self._submit(p, run_id, seq, make, refused="spoil" if learns else "none", request=request)

    async def note_arriving(self, p: Principal, run_id: str) -> None:
        """Part of an operation came in: those that are missing before others are waited for anew."""
        p.require("train")
        (await self._find(p, run_id)).note_arriving()

    async def checkpoint(
        self,
        p: Principal,
        run_id: str,
        seq: int,
        name: str,
        *,
        ttl_s: int | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        request: bytes = b"",
    ) -> None:
        """Operation `seq` keeps the resumable state under a name."""
        p.require("train")
        run = await self._trainable(p, run_id)
        spec = run.facts.spec

        async def make() -> Operation:
            check_name(name)
            check_ttl(ttl_s)
            check_labels(None, metadata or {})
            key = new_key(spec.run_id, seq)
            wanted = Announcement(p.project, spec.run_id, seq, NAMED, name=name, key=key, ttl_s=ttl_s, overwrite=overwrite, metadata=metadata or {})
            return SaveCheckpoint(key=await self._checkpoints.announce(wanted))

        await self._submit(p, run_id, seq, make, refused="none", request=request)

    async def snapshot(
        self,
        p: Principal,
        run_id: str,
        seq: int,
        name: str | None = None,
        *,
        kind: str = SNAPSHOT,
        ttl_s: int | None = None,
        metadata: Mapping[str, str] | None = None,
        request: bytes = b"",
    ) -> None:
        """Operation `seq` publishes the weights for sampling, under a name or as an ephemeral version; `kind` EXTERNAL for other programs."""
        p.require("train")
        run = await self._trainable(p, run_id)
        spec = run.facts.spec

        async def make() -> Operation:
            if name is not None:
                check_name(name)
            check_ttl(ttl_s)
            if kind == EXTERNAL:
                _check_expressible(spec.lora, self._models.size(spec.base_hash))
            # Read when the server started: to ask a thread for it takes longer than to look.
            tokenizer = self._models.tokenizer(spec.base_hash)
            check_labels(None, metadata or {})
            announced = kind != SNAPSHOT or name is not None or ttl_s is not None or bool(metadata)
            if announced:
                await self._checkpoints.announce(Announcement(p.project, spec.run_id, seq, kind, name=name, ttl_s=ttl_s, metadata=metadata or {}))
            return SaveSnapshot(template_hash=tokenizer.template_hash or "", announced=announced)

        await self._submit(p, run_id, seq, make, refused="none", request=request)

    async def load(self, p: Principal, run_id: str, seq: int, source: CheckpointRow, *, optimizer: bool, request: bytes = b"") -> None:
        """Operation `seq`, the first of the run, takes over what a named checkpoint holds."""
        p.require("train")
        run = await self._trainable(p, run_id)

        async def make() -> Operation:
            if seq != run.facts.first_seq:
                raise InvalidInput(
                    f"operation {seq} loads a checkpoint: only the first operation of a run may; create a run from it instead", field="seq"
                )
            _check_fits(run, source)
            spec = run.facts.spec
            wanted = Announcement(p.project, spec.run_id, seq, SOURCE, key=source.key)
            # A replay loads it again, also when it was deleted or expired since.
            return LoadCheckpoint(key=await self._checkpoints.announce(wanted), optimizer=optimizer)

        await self._submit(p, run_id, seq, make, request=request)

    async def result(self, p: Principal, run_id: str, seq: int, timeout_s: float) -> Result | None:
        """The result of an operation, as often as asked; None when there is none yet after `timeout_s`."""
        p.require("read", "train")
        run = await self._find(p, run_id)
        return await run.result(seq, timeout_s)

    async def waiting_for(self, p: Principal, run_id: str) -> str:
        """Why a result is not there yet."""
        p.require("read", "train")
        return (await self._find(p, run_id)).waiting_for()

    async def _known(self, p: Principal, tinker_id: str | None, request: Repeatable | None) -> bool:
        """Whether a run was created under this id, or by this request, before."""
        if request is not None and await self._database.read(lambda connection: run_of_request(connection, p.project, request) is not None):
            return True
        with suppress(NotFound):
            return tinker_id is not None and bool(await self._database.read(lambda connection: one_run(connection, p, tinker_id)))
        return False

    async def _submit(self, p: Principal, run_id: str, seq: int, make: Make, *, refused: Effect = "spoil", request: bytes) -> None:
        """`refused`: what a refusal does to the gradients. One of what would have touched none leaves them good."""
        # Looked up again: between two turns of the loop an idle run may have been retired.
        await (await self._find(p, run_id)).submit(seq, make, refused=refused, request=request)

    async def _trainable(self, p: Principal, run_id: str) -> ActiveRun:
        run = await self._find(p, run_id)
        # Raises where the base is not served any more: that is no fault of the operation, which may come again later.
        self._models.size(run.facts.spec.base_hash)
        return run

    async def _find(self, p: Principal, run_id: str) -> ActiveRun:
        key = (p.project, run_id)
        if key not in self._ids:
            row = await self._database.read(lambda connection: one_run(connection, p, run_id))
            if row.state == COPY:
                raise Conflict(f"run `{run_id}` only holds a copy of weights: create a run from those to train", field="run_id")
            self._ids[key] = row.id
        return await self._activity.take_up(self._ids[key])

    def _live(self, row: RunRow) -> RunRow:
        active = self._activity.get(row.id)
        return row if active is None else row._replace(next_seq=active.history.last_known + 1)


def _check_expressible(lora: LoraSpec, size: Size) -> None:
    """An export without a choice of form is an adapter for PEFT, which cannot load one on experts and on dense layers or shared experts."""
    if lora.rank and lora.train_mlp and size.partly_dense:
        what = "the adapter is on experts and on dense or shared ones, which PEFT cannot load together"
        raise InvalidInput(f"{what}: save it for the sampler and write a whole model of it with `bloomery export --merged`", field="path")


def _check_fits(run: ActiveRun, source: CheckpointRow) -> None:
    spec = run.facts.spec
    if source.kind != NAMED:
        raise InvalidInput(f"`{source.path}` is for sampling: load a `weights` path", field="path")
    if source.base_hash != spec.base_hash:
        raise InvalidInput(f"the checkpoint belongs to base model `{source.base_model}`: create the run on that", field="base_model")
    if (field := source.lora.misfit(spec.lora)) is not None:
        raise InvalidInput(f"the checkpoint was trained with {field}={getattr(source.lora, field)}: create the run with the same", field=field)
