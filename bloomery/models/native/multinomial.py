"""The draw of tokens: numbers from 0 to 1 fall into the shares of their rows.

Shapes: B rows to draw from, k draws of each, V vocabulary.
"""

import numpy as np
import numpy.typing as npt

from bloomery.models.native import bindings


def invert(logs_BV: npt.NDArray[np.float32], numbers_Bk: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The columns [B, k] in whose shares of `exp(logs)` numbers from 0 to 1 fall."""
    logs_BV, numbers_Bk = np.ascontiguousarray(logs_BV, np.float32), np.ascontiguousarray(numbers_Bk, np.float64)
    found_Bk = np.empty(numbers_Bk.shape, np.int64)
    sums = np.empty((len(logs_BV), -(-logs_BV.shape[1] // bindings.BLOCK)))
    bindings.call("invert", found_Bk.ctypes.data, logs_BV.ctypes.data, numbers_Bk.ctypes.data, sums.ctypes.data, *logs_BV.shape, numbers_Bk.shape[1])
    return found_Bk


def draw(
    logits_BV: npt.NDArray[np.float32], seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.uint64], samples_B: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A token from every row [B], by `invert` of `logits - max` with the number of its seed, position and sample; and what `logsumexp` gives [B]."""
    logits_BV = np.ascontiguousarray(logits_BV, np.float32)
    found_B, logsumexp_B = np.empty(len(logits_BV), np.int64), np.empty(len(logits_BV), np.float32)
    sums = np.empty((len(logits_BV), -(-logits_BV.shape[1] // bindings.BLOCK)))
    arrays = found_B, logsumexp_B, logits_BV, seeds_B, positions_B, samples_B, sums
    bindings.call("draw", *(array.ctypes.data for array in arrays), *logits_BV.shape)
    return found_B, logsumexp_B
