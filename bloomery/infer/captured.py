"""A decode step on a GPU as one graph of its kernels: launched in one call, where the processor would need longer to launch them one by one than the
GPU to compute them.

Shapes: R rows, D hidden.
"""

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from bloomery.infer.attention import CachedAttention
from bloomery.models.adapters import AdapterRows
from bloomery.models.bank import Bank
from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.gpu import attention as gpu_attention


class CapturedStep:
    """A graph, what it reads anew each time, and where it leaves the hidden states. `pool` is memory of graphs that run one after the other."""

    def __init__(self, decoder: Decoder, tokens_R: Tensor, positions_R: Tensor, attention: CachedAttention, adapters: AdapterRows, pool: Any) -> None:
        self.weights: tuple[ReferenceType[Any], ...] = tuple(ref(each) for each in weights_of(decoder, adapters))
        self.proved = False
        # What is stacked for the graph stays where it is for as long as its adapters live; it keeps none of them alive.
        self._bank = Bank()
        adapters = adapters._replace(bank=self._bank)
        self._tokens_R, self._positions_R, self._spans = tokens_R, positions_R, attention.spans
        # Once without it: kernels are compiled, and copies of the spans made, where a graph cannot.
        decoder.hidden(tokens_R, positions_R, attention, adapters)
        self._graph = torch.cuda.CUDAGraph()
        current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            # Other threads may train meanwhile.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._hidden_RD = decoder.hidden(tokens_R, positions_R, attention, adapters)
            finally:
                self._graph.capture_end()
        current.wait_stream(beside)

    def again(self, decoder: Decoder, tokens_R: Tensor, positions_R: Tensor, attention: CachedAttention) -> Tensor:
        """With other tokens."""
        self._tokens_R.copy_(tokens_R)
        self._positions_R.copy_(positions_R)
        gpu_attention.renew(self._spans, attention.spans)
        self._graph.replay()
        return self._hidden_RD


def weights_of(decoder: Decoder, adapters: AdapterRows) -> tuple[Decoder | FusedAdapter, ...]:
    """Whose memory a step reads."""
    return decoder, *(adapter for adapter, _, _ in adapters.segments if adapter is not None)
