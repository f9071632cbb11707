"""Keys and values of all running samples, in slots 0 to n - 1 without gaps.

Shapes: N layers, S slots, K key/value heads, L places for tokens, E head dimension.
"""

import torch
from torch import Tensor

from bloomery.infer.plan import Sample
from bloomery.models.attention import KEY_PAD, pad_to
from bloomery.models.config import DecoderConfig

_SLOT_STEP = 8
_KEEP_BYTES = 64 << 20
"""An idle cache larger than this is given back."""


class KeyValueCache:
    """Compact slots: a decode step reads slots 0 to n - 1 in one piece; a released slot is filled by the last one.

    Places that nobody wrote hold zeros: attention masks them, but a NaN left behind by another sample would pass through the mask.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self.samples: list[Sample] = []
        """Who holds slot 0, 1, ..."""
        self.keys_NSKLE = self.values_NSKLE = self._empty(0, 0)

    @staticmethod
    def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
        """Memory of one place."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def slot(self, sample: Sample) -> int:
        """Where a placed sample lies at the moment."""
        return self.samples.index(sample)

    def place(self, sample: Sample) -> None:
        """Give the next slot to a sample."""
        self.samples.append(sample)

    def release(self, sample: Sample) -> None:
        """Free a sample's slot, moving the last sample into it."""
        slot, last = self.slot(sample), len(self.samples) - 1
        self._clear(slot, sample.cached)
        if slot != last:
            moved = self.samples[last]
            self._copy(last, slot, moved.cached)
            self._clear(last, moved.cached)
            self.samples[slot] = moved
        self.samples.pop()
        if not self.samples and self.keys_NSKLE.nbytes + self.values_NSKLE.nbytes > _KEEP_BYTES:
            self.clear()

    def fork(self, source: Sample, target: Sample) -> None:
        """Copy the keys and values that both samples share."""
        self._copy(self.slot(source), self.slot(target), target.shared)
        target.cached = target.shared

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.samples.clear()
        self.keys_NSKLE = self.values_NSKLE = self._empty(0, 0)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in every placed sample's slot, keeping what is cached."""
        if len(self.samples) > self.keys_NSKLE.shape[1] or length > self.keys_NSKLE.shape[3]:
            # One after the other: the old and the new form of both never exist together.
            self.keys_NSKLE = self._resized(self.keys_NSKLE, length)
            self.values_NSKLE = self._resized(self.values_NSKLE, length)

    def _resized(self, old_NSKLE: Tensor, length: int) -> Tensor:
        new_NSKLE = self._empty(pad_to(len(self.samples), _SLOT_STEP), pad_to(length, KEY_PAD))
        for slot, sample in enumerate(self.samples):
            if sample.cached:
                new_NSKLE[:, slot, :, : sample.cached] = old_NSKLE[:, slot, :, : sample.cached]
        return new_NSKLE

    def _empty(self, slots: int, length: int) -> Tensor:
        shape = (self._config.num_layers, slots, self._config.num_kv_heads, length, self._config.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for storage in (self.keys_NSKLE, self.values_NSKLE):
            storage[:, target, :, :tokens] = storage[:, source, :, :tokens]

    def _clear(self, slot: int, tokens: int) -> None:
        for storage in (self.keys_NSKLE, self.values_NSKLE):
            storage[:, slot, :, :tokens] = 0
