"""Losses that clients defined, by the number that their session gave them.

An operation gets a copy of the loss it names before it is journaled, so nothing that was accepted depends on the rows here.
"""

import base64
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, func, insert, select

from bloomery.services.access.principal import Principal
from bloomery.store import rows
from bloomery.store.database import Database
from bloomery.types.custom_loss import CustomLoss
from bloomery.types.errors import Conflict, InvalidInput, NotFound, NotSupported
from bloomery.types.ids import new_id, now_us
from bloomery.types.losses import TARGETS
from bloomery.types.operations import ForwardBackward
from bloomery.types.wire import encode

MAX_LOSSES: Final = 1000
"""Of one session."""
LOSS_ID: Final = "loss_id"
"""The option that names a loss."""

_losses: Final[msgspec.msgpack.Decoder[CustomLoss]] = msgspec.msgpack.Decoder(CustomLoss)


class CustomLosses:
    """Keeps them, for the whole project; not `offered` unless the server was started so."""

    def __init__(self, database: Database, *, offered: bool) -> None:
        self._database = database
        self.offered = offered

    def require_offered(self) -> None:
        """Refuse where clients are to compute their losses themselves."""
        if not self.offered:
            what = "start it with `--custom-losses`, or give `forward_backward_custom` a function, which your side computes"
            raise NotSupported(f"this server does not offer losses that run on it: {what}", field="graph")

    async def create(self, p: Principal, session_id: str, seq: int, loss: CustomLoss) -> str:
        """The id of a checked loss; asked again for the same number, the same id."""
        p.require("train")
        self.require_offered()
        values = {"id": new_id("loss"), "project": p.project, "session_id": session_id, "seq": seq, "name": loss.name}
        values |= {"definition": base64.b64encode(encode(loss)).decode(), "created_us": now_us()}
        return await self._database.write(lambda connection: _add(connection, values))

    async def get(self, p: Principal, loss_id: str) -> CustomLoss:
        """One loss."""
        p.require("train")
        table = rows.custom_loss.c
        query = select(table.definition).where(table.project == p.project, table.id == loss_id)
        definition = await self._database.read(lambda connection: connection.scalar(query))
        if definition is None:
            raise NotFound(f"no custom loss `{loss_id}`: create it first", field="loss_fn_config.loss_id")
        return _losses.decode(base64.b64decode(definition))

    async def attach(self, p: Principal, operation: ForwardBackward) -> ForwardBackward:
        """The operation with the loss that its options name."""
        p.require("train")
        self.require_offered()
        config = dict(operation.loss_config)
        loss_id = config.pop(LOSS_ID, None)
        if not isinstance(loss_id, str):
            what = "have `forward_backward_custom` send it, or compute it on your side with a function"
            raise InvalidInput(f"loss `custom` needs the option `{LOSS_ID}`: {what}", field="loss_fn_config.loss_id")
        loss = await self.get(p, loss_id)
        # One batch may serve several losses. What this one does not read is not bounded by anything, and nobody needs it.
        read = {TARGETS, *(given.name for given in loss.inputs)}
        kept = [{name: values for name, values in datum.inputs.items() if name in read} for datum in operation.data]
        data = tuple(msgspec.structs.replace(datum, inputs=inputs) for datum, inputs in zip(operation.data, kept, strict=True))
        return msgspec.structs.replace(operation, loss_config=config, custom=loss, data=data)


def _add(connection: Connection, values: dict[str, Any]) -> str:
    table = rows.custom_loss.c
    mine = (table.project == values["project"], table.session_id == values["session_id"])
    known = connection.execute(select(table.id, table.definition).where(*mine, table.seq == values["seq"])).one_or_none()
    if known is None:
        if (connection.scalar(select(func.count()).select_from(rows.custom_loss).where(*mine)) or 0) >= MAX_LOSSES:
            raise InvalidInput(f"this session has {MAX_LOSSES} custom losses, and no more are taken: use those there are", field="custom_loss_seq_id")
        connection.execute(insert(rows.custom_loss).values(values))
        return str(values["id"])
    if known.definition != values["definition"]:
        raise Conflict(
            f"custom loss {values['seq']} of this session is another one: number your losses one after the other", field="custom_loss_seq_id"
        )
    return str(known.id)
