"""`native.c`, compiled for this machine: the pointwise parts of a block, the head's reduction and the draw of tokens, each in one pass.

A step of few rows of a small model is little more than the calls that it makes, and torch makes ten of what is one here; a pass of many rows
reads and writes every activation as often. The C compiler `cc` is asked when something is first computed, and its library kept beside the bytecode,
or in the user's cache. Where there is none, and for other dtypes and devices, torch computes the same formulas (`available`); which of the two is
part of the numerics id. `BLOOMERY_NATIVE=0` asks for torch.
Shapes: R rows, N heads, E head dimension, I intermediate, V vocabulary; B rows to draw from, k draws of each.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bloomery.obs.machine import processor_flags

log = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_suffix(".c")
_BLOCK: Final = 512
"""Values that are added up before their sum is."""
_FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-Wno-psabi", f"-DBLOCK={_BLOCK}")
"""Contracted products and sums would have other bits on processors that have them."""
_COMPILE_S: Final = 60.0
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: Final = {
    "rms_norm": (_P, _P, _P, _I, _I, _P, _I, _I, _I, _F),
    "rms_norm_backward": (_P, _P, _P, _I, _I, _P, _P, _I, _I, _I),
    "rotate": (_P, _P, _I, _I, _P, _P, _F, _I, _I, _I),
    "swiglu": (_P, _P, _I, _I),
    "swiglu_backward": (_P, _P, _P, _I, _I),
    "logsumexp": (_P, _P, _I, _I),
    "softmax_gradient": (_P, _P, _P, _I, _I),
    "invert": (_P, _P, _P, _P, _I, _I, _I),
}


def _identity() -> str:
    """Of the source, the flags and the processor."""
    return hashlib.sha256("|".join((_SOURCE.read_text(), *_FLAGS, platform.machine(), *sorted(processor_flags()))).encode()).hexdigest()[:16]


@cache
def _kernels() -> Any:
    """The compiled library, asked for when something is first computed; None where there is none."""
    # Elsewhere the threads of torch are another library's, and two of them would fight for the processors.
    if os.environ.get("BLOOMERY_NATIVE") == "0" or not sys.platform.startswith("linux"):
        return None
    failures, name = [], f"native-{_identity()}.so"
    for place in _places():
        try:
            if not (place / name).exists():
                _compile(place / name)
            return _bound(ctypes.CDLL(str(place / name)))
        except subprocess.SubprocessError as error:
            # Elsewhere the compiler would say the same.
            failures.append(f"cc: {getattr(error, 'stderr', None) or error}")
            break
        except OSError as error:
            failures.append(f"{place}: {error}")
    log.warning("torch computes what native kernels would: %s", "; ".join(failures))
    return None


def _places() -> Iterator[Path]:
    yield _SOURCE.parent / "__pycache__"
    # Of a user without a home there is none.
    with suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bloomery"


def _compile(path: Path) -> None:
    """Not linked against a library of threads: torch has loaded its own, whose threads these kernels share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        parts = [f"{place}/native.o", f"{place}/native.so"]
        for command in (["cc", *_FLAGS, "-c", str(_SOURCE), "-o", parts[0]], ["cc", "-shared", parts[0], "-o", parts[1], "-lm"]):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        # In one step, for whoever else compiles at the same time.
        Path(parts[1]).replace(path)


def _bound(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def present() -> bool:
    """Whether there are kernels here."""
    return _kernels() is not None


def identity() -> str:
    """Who computes what is pointwise, for the numerics id."""
    return f"native-{_identity()}" if present() else "torch"


def available(*tensors: Tensor) -> bool:
    """Whether the functions below take them."""
    return _kernels() is not None and all(tensor.dtype is torch.float32 and tensor.is_cpu for tensor in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, scaled: bool = False) -> tuple[Tensor, Tensor | None]:
    """`x * scale * weight` of vectors in the last dimension, and where `scaled` their scales [..., 1], which the backward takes."""
    x, weight = _vectors(x), weight.contiguous()
    out = torch.empty(x.shape)
    scale = torch.empty(*x.shape[:-1], 1) if scaled else None
    rows, heads, *strides = _layout(x)
    pointer = None if scale is None else scale.data_ptr()
    _kernels().rms_norm(out.data_ptr(), pointer, x.data_ptr(), *strides, weight.data_ptr(), rows, heads, x.shape[-1], eps)
    return out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What reaches `x`."""
    x, grad, weight = _vectors(x), grad.contiguous(), weight.contiguous()
    grad_x = torch.empty(x.shape)
    rows, heads, *strides = _layout(x)
    pointers = grad_x.data_ptr(), grad.data_ptr(), x.data_ptr(), *strides, weight.data_ptr(), scale.data_ptr()
    _kernels().rms_norm_backward(*pointers, rows, heads, x.shape[-1])
    return grad_x


def rotate(x_RNE: Tensor, cos_R1H: Tensor, sin_R1H: Tensor, *, back: bool = False) -> Tensor:
    """The halves of every head, turned; a cosine and a sine for each row and pair."""
    assert x_RNE.dim() == 3
    assert cos_R1H.numel() == sin_R1H.numel() == len(x_RNE) * x_RNE.shape[-1] // 2
    x_RNE, cos_R1H, sin_R1H = _vectors(x_RNE), cos_R1H.contiguous(), sin_R1H.contiguous()
    out_RNE = torch.empty(x_RNE.shape)
    rows, heads, *strides = _layout(x_RNE)
    pointers = out_RNE.data_ptr(), x_RNE.data_ptr(), *strides, cos_R1H.data_ptr(), sin_R1H.data_ptr()
    _kernels().rotate(*pointers, -1.0 if back else 1.0, rows, heads, x_RNE.shape[-1])
    return out_RNE


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the halves of the last dimension."""
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _kernels().swiglu(out.data_ptr(), gate_up.data_ptr(), _count(out), out.shape[-1])
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """What reaches `gate_up`."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    grad_gate_up = torch.empty(gate_up.shape)
    _kernels().swiglu_backward(grad_gate_up.data_ptr(), grad.data_ptr(), gate_up.data_ptr(), _count(grad), grad.shape[-1])
    return grad_gate_up


def logsumexp(x_RV: Tensor) -> Tensor:
    """Of every row [R]."""
    x_RV = x_RV.contiguous()
    out_R = torch.empty(len(x_RV))
    _kernels().logsumexp(out_R.data_ptr(), x_RV.data_ptr(), *x_RV.shape)
    return out_R


def softmax_gradient(x_RV: Tensor, mass_R: Tensor) -> Tensor:
    """`-softmax(x) * mass`."""
    x_RV, mass_R = x_RV.contiguous(), mass_R.contiguous()
    out_RV = torch.empty(x_RV.shape)
    _kernels().softmax_gradient(out_RV.data_ptr(), x_RV.data_ptr(), mass_R.data_ptr(), *x_RV.shape)
    return out_RV


def invert(logs_BV: npt.NDArray[np.float32], numbers_Bk: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The columns [B, k] in whose shares of `exp(logs)` numbers from 0 to 1 fall."""
    logs_BV, numbers_Bk = np.ascontiguousarray(logs_BV, np.float32), np.ascontiguousarray(numbers_Bk, np.float64)
    found_Bk = np.empty(numbers_Bk.shape, np.int64)
    sums = np.empty((len(logs_BV), -(-logs_BV.shape[1] // _BLOCK)))
    _kernels().invert(found_Bk.ctypes.data, logs_BV.ctypes.data, numbers_Bk.ctypes.data, sums.ctypes.data, *logs_BV.shape, numbers_Bk.shape[1])
    return found_Bk


def _vectors(x: Tensor) -> Tensor:
    """In a layout that `_layout` can tell."""
    return x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.contiguous()


def _layout(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, floats from row to row and from head to head."""
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return _count(x), 1, x.shape[-1], 0


def _count(x: Tensor) -> int:
    """Vectors in the last dimension."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


if __name__ == "__main__":
    print(f"pointwise kernels: {identity()}")
