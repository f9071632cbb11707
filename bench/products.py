"""Products whose rows have the same bits in any company, beside torch's: `python -m bench.products --device cuda` prints one JSON line.

Both in turns, as graphs, in microseconds by the GPU's clock, of rows x summed x columns: `forward` with a weight as it lies for products, and, with
many rows, `rows_gradient` and `weight_gradient` with operands as they lie for those. Few rows meet a weight that comes from memory each time.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from bench.line import Line, parser_of
from bench.machine import device_name
from bloomery.models.gpu import launch
from bloomery.models.gpu.products import multiply

SHAPES: Final = ((2048, 1024, 5632), (2048, 2816, 1024), (256, 1024, 5632), (32, 1024, 5632), (1, 1024, 5632), (32, 768, 2304))
DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MANY: Final = 256
"""Rows from which on gradients are measured."""
IN_NO_CACHE: Final = 150_000_000
"""Bytes of weights that take turns where rows are few."""
ROUNDS: Final = 5
Product = Callable[[Tensor, Tensor], Tensor]


class Layout(NamedTuple):
    """Which of the operands lie in columns."""

    a: bool
    b: bool


LAYOUTS: Final = {"forward": Layout(False, True), "rows_gradient": Layout(False, False), "weight_gradient": Layout(True, False)}


def main() -> None:
    """Measure every dtype, layout and shape."""
    asked = _arguments()
    line = Line("products")
    found = {name: {layout: _shapes(dtype, layout, asked.device) for layout in LAYOUTS} for name, dtype in DTYPES.items()}
    line.tell({"device": device_name(asked.device), "peer": f"torch {torch.__version__}", "rounds": ROUNDS, **found})


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", required=True, help="a GPU: `cuda`, or `cuda:1`")
    asked = parser.parse_args()
    if torch.device(asked.device).type != "cuda" or not torch.cuda.is_available():
        raise SystemExit(f"these products are a GPU's, and `{asked.device}` is none here: run it with `--device cuda` where there is one")
    if launch.kernels() is None:
        raise SystemExit("there is no Triton here, which comes with torch for GPUs: install that one")
    return asked


def _shapes(dtype: torch.dtype, name: str, device: str) -> dict[str, Any]:
    shapes = [shape for shape in SHAPES if name == "forward" or shape[0] >= MANY]
    return {"x".join(map(str, shape)): _compare(dtype, LAYOUTS[name], shape, device) for shape in shapes}


def _compare(dtype: torch.dtype, layout: Layout, shape: tuple[int, int, int], device: str) -> dict[str, float]:
    rows, summed, columns = shape
    a = _noise(rows, summed, dtype, device, in_columns=layout.a)
    count = math.ceil(IN_NO_CACHE / (summed * columns * dtype.itemsize)) if rows < MANY else 1
    weights = [_noise(summed, columns, dtype, device, in_columns=layout.b) for _ in range(count)]
    if not torch.equal(multiply(a[:1], weights[0]), multiply(a, weights[0])[:1]):
        raise SystemExit(f"a row of {list(shape)} in {dtype} has other bits alone")
    graphs = {name: _Graph(product, a, weights) for name, product in (("exact", multiply), ("cublas", torch.mm))}
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            took[name].append(graph.product_us())
    exact, cublas = min(took["exact"]), min(took["cublas"])
    return {"exact_us": round(exact, 2), "cublas_us": round(cublas, 2), "exact_over_cublas": round(exact / cublas, 2)}


def _noise(rows: int, columns: int, dtype: torch.dtype, device: str, *, in_columns: bool) -> Tensor:
    if in_columns:
        return _noise(columns, rows, dtype, device, in_columns=False).t()
    return torch.randn(rows, columns, device=device).to(dtype)


class _Graph:
    """Products with each of the weights, and at least ten, in one launch."""

    def __init__(self, product: Product, a: Tensor, weights: Sequence[Tensor]) -> None:
        self._products = max(10, len(weights))
        product(a, weights[0])
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for number in range(self._products):
                product(a, weights[number % len(weights)])
        self._graph.replay()

    def product_us(self) -> float:
        """Of one of them, in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / self._products


if __name__ == "__main__":
    main()
