"""What records of operations know about each other."""

from typing import Any

import msgspec
import pytest

from bloomery.types.operations import ForwardBackward, LoraSpec, SnapshotResult, Travelled
from bloomery.types.wire import encode

SPEC = LoraSpec(rank=4, seed=1)
OTHER: dict[str, Any] = {"rank": 8, "alpha": 16.0, "train_attn": False, "train_mlp": False, "train_unembed": False}


def test_weights_fit_wherever_only_the_seed_differs() -> None:
    assert SPEC.misfit(msgspec.structs.replace(SPEC, seed=2)) is None
    assert {"seed", *OTHER} == set(SPEC.__struct_fields__)


@pytest.mark.parametrize("field", OTHER)
def test_weights_fit_nowhere_else_and_the_field_is_named(field: str) -> None:
    other = msgspec.structs.replace(SPEC, **{field: OTHER[field]})
    assert SPEC.misfit(other) == other.misfit(SPEC) == field


def test_an_operation_of_an_older_journal_gives_everything() -> None:
    told = msgspec.msgpack.decode(encode(ForwardBackward(loss="cross_entropy", loss_config={}, data=(), return_logprobs=False)))
    assert told.pop("return_logprobs") is False
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ForwardBackward).return_logprobs


def test_of_a_version_it_is_measured_what_travels_of_how_much_and_as_what() -> None:
    adapter = SnapshotResult(version="v", key="k", size_bytes=1000, step=3)
    assert adapter.sync() == {"sync/bytes": 1000, "sync/whole_bytes": 1000}
    first = Travelled(bytes=1010, whole=True, changed=None, codecs={"raw": 990})
    assert msgspec.structs.replace(adapter, travelled=first).sync() == {
        "sync/bytes": 1010,
        "sync/whole_bytes": 1000,
        "sync/delta": 0,
        "sync/raw_bytes": 990,
    }
    next_one = Travelled(bytes=70, whole=False, changed=0.01, codecs={"tight": 40, "fast_zstd": 20})
    assert msgspec.structs.replace(adapter, travelled=next_one).sync() == {
        "sync/bytes": 70,
        "sync/whole_bytes": 1000,
        "sync/delta": 1,
        "sync/changed": 0.01,
        "sync/tight_bytes": 40,
        "sync/fast_zstd_bytes": 20,
    }
