"""Products with the precision of float32 from products of bfloat16, on processors with tiles of it: for gradients.

Shapes: R rows, S steps of the sums of a result with C columns.
"""

import torch
from torch import Tensor

from bloomery.models.native import bindings, buffers


def multiplies(*tensors: Tensor) -> bool:
    """Whether `product` takes these."""
    return bindings.available(*tensors) and bindings.tiles_are_granted()


def room_bytes() -> int:
    """Memory that a `product` takes meanwhile."""
    return bindings.number("split_product_room", torch.get_num_threads()) if bindings.tiles_are_granted() else 0


def product(a_RS: Tensor, b_SC: Tensor, out_RC: Tensor | None = None) -> Tensor:
    """`a @ b` [R, C], added to `out` where there is one, with float32's precision from products of bfloat16.

    A number depends on its row and its column alone. No sampler computes it, so its bits may be other than those of `gemm.product`.
    """
    a_RS, b_SC = (x if 1 in x.stride() else x.contiguous() for x in (a_RS, b_SC))
    (rows, steps), columns, threads = a_RS.shape, b_SC.shape[1], torch.get_num_threads()
    assert len(b_SC) == steps
    adds = out_RC is not None
    out_RC = buffers.floats(rows, columns, zeros=steps == 0) if out_RC is None else out_RC
    assert out_RC.shape == (rows, columns)
    assert out_RC.stride(1) == 1
    scratch = torch.empty(room_bytes(), dtype=torch.uint8, device="cpu")
    bindings.call(
        "split_product",
        *(out_RC.data_ptr(), out_RC.stride(0), a_RS.data_ptr(), *a_RS.stride(), b_SC.data_ptr(), b_SC.stride(1), b_SC.stride(0)),
        *(rows, columns, steps, adds, scratch.data_ptr(), threads),
    )
    return out_RC
