"""Custom losses as rows: created once, attached to operations, and data that do not fit them refused."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bloomery.services.clients.custom_losses import CustomLosses
from bloomery.services.engines.models import Size
from bloomery.store.database import Database
from bloomery.types.arrays import Array
from bloomery.types.checks import check_forward_backward
from bloomery.types.custom_loss import Call, CustomInput, CustomLoss, Ref
from bloomery.types.errors import Conflict, InvalidInput, NotFound, NotSupported
from bloomery.types.operations import Datum, ForwardBackward
from tests.services.runs_stage import ME, STRANGER
from tests.store.template import migrated

LOSS = CustomLoss(
    name="mine",
    inputs=(CustomInput(name="logprobs", rank=1), CustomInput(name="scale", rank=0), CustomInput(name="wanted", rank=2)),
    calls=(
        Call(name="bounded", operator="clamp", arguments={"input": Ref(number=0), "min": -math.inf}),
        Call(name="total", operator="sum", arguments={"input": Ref(number=3)}),
    ),
    loss=4,
    metrics={},
)
DATUM = Datum(
    tokens=Array.of(np.asarray([1, 2])),
    inputs={
        "target_tokens": Array.of(np.asarray([2, 3])),
        "scale": Array.of(np.asarray([0.5], np.float32)),
        "wanted": Array.of(np.zeros((2, 3), np.int64)),
        "weights": Array.of(np.asarray([math.nan], np.float32)),
    },
)
OPERATION = ForwardBackward(loss="custom", loss_config={}, data=(DATUM,), custom=LOSS)


def play(directory: Path, story: Callable[[CustomLosses], Awaitable[None]], *, offered: bool = True) -> None:
    async def run() -> None:
        await story(CustomLosses(database, offered=offered))

    with Database(migrated(directory / "bloomery.db")) as database:
        asyncio.run(run())


def named(loss_id: object) -> ForwardBackward:
    return ForwardBackward(loss="custom", loss_config={"loss_id": loss_id}, data=(DATUM,))


def test_a_loss_is_created_once_and_attached_as_it_is(tmp_path: Path) -> None:
    async def story(losses: CustomLosses) -> None:
        loss_id = await losses.create(ME, "session", 0, LOSS)
        assert await losses.create(ME, "session", 0, LOSS) == loss_id
        assert await losses.create(ME, "session", 1, LOSS) != loss_id
        with pytest.raises(Conflict, match="custom loss 0 of this session is another one"):
            await losses.create(ME, "session", 0, msgspec.structs.replace(LOSS, loss=3))
        # `weights` are for other losses.
        read = {name: values for name, values in DATUM.inputs.items() if name != "weights"}
        attached = msgspec.structs.replace(OPERATION, data=(msgspec.structs.replace(DATUM, inputs=read),))
        assert await losses.attach(ME, named(loss_id)) == attached
        for wrong in ("loss-nobody", 7.0):
            with pytest.raises((NotFound, InvalidInput), match=r"no custom loss|needs the option"):
                await losses.attach(ME, named(wrong))
        with pytest.raises(NotFound):
            await losses.attach(STRANGER, named(loss_id))

    play(tmp_path, story)


def test_a_server_that_was_not_asked_to_computes_none(tmp_path: Path) -> None:
    async def story(losses: CustomLosses) -> None:
        for refused in (losses.create(ME, "session", 0, LOSS), losses.attach(ME, named("loss-1"))):
            with pytest.raises(NotSupported, match="--custom-losses"):
                await refused

    play(tmp_path, story, offered=False)


def with_input(**inputs: Array | None) -> ForwardBackward:
    changed = {name: values for name, values in (DATUM.inputs | inputs).items() if values is not None}
    return msgspec.structs.replace(OPERATION, data=(DATUM, msgspec.structs.replace(DATUM, inputs=changed)))


@pytest.mark.parametrize(
    ("operation", "field", "says"),
    [
        (with_input(wanted=None), "data[1].loss_fn_inputs.wanted", "lacks `wanted`, which loss `mine` takes"),
        (with_input(target_tokens=None), "data[1].loss_fn_inputs.target_tokens", "lacks `target_tokens`"),
        (
            with_input(wanted=Array.of(np.zeros(2, np.float32))),
            "data[1].loss_fn_inputs.wanted",
            "has rank 1, but loss `mine` declares `wanted` with rank 2",
        ),
        (with_input(scale=Array.of(np.zeros(2, np.float32))), "data[1].loss_fn_inputs.scale", "has rank 1"),
        (with_input(target_tokens=Array.of(np.zeros((2, 2), np.int64))), "data[1].loss_fn_inputs.target_tokens", "declares `logprobs` with rank 1"),
        (with_input(target_tokens=Array.of(np.asarray([2, 99]))), "data[1].loss_fn_inputs.target_tokens", "token id 99"),
        (msgspec.structs.replace(OPERATION, custom=None), "loss_fn_config.loss_id", "must come with its definition"),
        (msgspec.structs.replace(OPERATION, loss="ppo"), "custom", "loss `ppo` takes no definition"),
        (msgspec.structs.replace(OPERATION, loss_config={"beta": 1.0}), "loss_fn_config", "has no options"),
        (msgspec.structs.replace(OPERATION, return_logprobs=False), "loss_fn_config.return_logprobs", "leave out the option"),
        (msgspec.structs.replace(OPERATION, custom=msgspec.structs.replace(LOSS, loss=9)), "graph", "does not return its loss"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(operation: ForwardBackward, field: str, says: str) -> None:
    size = Size(context=8, vocab_size=10, width=8)
    check_forward_backward(OPERATION, size)
    with pytest.raises(InvalidInput) as refused:
        check_forward_backward(operation, size)
    assert refused.value.field == field
    assert says in refused.value.message
