"""Arrays are what they say: their shape and their bytes agree."""

import msgspec
import numpy as np
import pytest

from bloomery.types.arrays import Array
from bloomery.types.wire import encode


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_an_array_has_the_values_that_it_was_made_of(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    assert np.array_equal(Array.of(values).numpy(), values)


def test_sizes_are_few_whose_product_is_worked_out() -> None:
    # Of this many it would take hours.
    sizes = (1 << 63,) * 3_000_000
    with pytest.raises(msgspec.ValidationError, match="length <= 8"):
        msgspec.msgpack.decode(encode({"dtype": "int32", "shape": sizes, "data": b""}), type=Array)


@pytest.mark.parametrize(("shape", "size_bytes"), [((2,), 4), ((-1, -1), 4), ((0, -1), 0), ((1 << 32, 1 << 32), 0), ((4, 1 << 62), 0)])
def test_sizes_that_the_bytes_do_not_have_are_refused(shape: tuple[int, ...], size_bytes: int) -> None:
    with pytest.raises(ValueError, match="an Array of int32"):
        Array(dtype="int32", shape=shape, data=bytes(size_bytes))
