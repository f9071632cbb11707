"""Keys, values and states of all running samples, in slots 0 to n - 1 without gaps, and of some that have left.

Beside those of a token lie the experts that it went to, and what their answers were multiplied with, so that whoever takes over its keys and values
knows them too. These weights are kept in the compute dtype, to which they were rounded before they were used.
Shapes: N layers, S slots, K key/value heads, L places for tokens, T tokens of one sequence, E head dimension, B samples. Of experts N are the sparse
layers alone, E the experts per token, and K is 1.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.plan import LEAST_SHARED, Kept, Sample, Stem, Stretch, in_common
from bloomery.infer.states import Beginning, States
from bloomery.models.config import DecoderConfig
from bloomery.models.pads import KEY_PAD, pad_to

MAX_KEPT: Final = 256
"""Sequences: every newcomer is compared with those whose head is its own."""
_EXPERT: Final = torch.int16
_SLOT_STEP = 8
_ALIGNED: Final = 64
"""Bytes, as torch places its tensors: kernels may take what lies otherwise in another way."""
_KEEP_BYTES = 64 << 20
"""Idle slots larger than this are given back."""


class _Contents(NamedTuple):
    """What is stored of one sequence."""

    storages_NKTE: tuple[Tensor, ...]
    """Keys, values, experts and their weights."""
    beginnings: tuple[Beginning, ...]
    """Where one can go on, of a model that has states."""


class Storage(NamedTuple):
    """The memory of keys and values: kernels that got the same find the same there."""

    keys: int
    values: int
    """Addresses."""
    shape: tuple[int, ...]

    @property
    def places(self) -> int:
        """Tokens that a slot has room for."""
        return self.shape[3]


class KeyValueCache:
    """Compact slots: a decode step reads slots 0 to n - 1 in one piece; a released slot is filled by the last one.

    Places that nobody wrote hold zeros: attention masks them, but a NaN left behind by another sample would pass through the mask.
    Storage grows to twice as many slots, within `cache_tokens` places in all, or by those alone that are asked for.
    What is kept of sequences that have left lies apart, `kept_tokens` places in all, and the longest unused goes first.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", cache_tokens: int = 0, kept_tokens: int = 0
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._cache_tokens, self._kept_tokens = cache_tokens, kept_tokens
        self.samples: list[Sample] = []
        """Who holds slot 0, 1, ..."""
        self._state_tokens = self.state_tokens(config, dtype)
        self.keys_NSKLE: Tensor
        self.values_NSKLE: Tensor
        self.experts_NSKLE: Tensor
        self.expert_weights_NSKLE: Tensor
        self.states: States | None
        self._give_back()
        self._kept: dict[Kept, _Contents] = {}
        """The longest unused first."""

    @staticmethod
    def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
        """Memory of one place."""
        experts = 0 if config.routing is None else len(config.routing.sparse_layers) * config.routing.top_k
        keys_and_values = 2 * len(config.kv_layers) * config.num_kv_heads * config.head_dim
        return keys_and_values * dtype.itemsize + experts * (_EXPERT.itemsize + dtype.itemsize)

    @staticmethod
    def state_tokens(config: DecoderConfig, dtype: torch.dtype) -> int:
        """As how many places the states of a sequence count: where it stands, and where its prompt ended."""
        return -(-2 * States.bytes_per_sequence(config, dtype) // KeyValueCache.bytes_per_token(config, dtype))

    @property
    def kept(self) -> Sequence[Kept]:
        """What can be taken over from sequences that have left."""
        return list(self._kept)

    @property
    def storage(self) -> Storage:
        """Where it is at the moment."""
        return Storage(self.keys_NSKLE.data_ptr(), self.values_NSKLE.data_ptr(), self.keys_NSKLE.shape)

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
            if self.states is not None:
                self.states.move(last, slot)
            self._clear(last, moved.cached)
            self.samples[slot] = moved
        self.samples.pop()
        if self.states is not None:
            self.states.retain_marks({sample.stem for sample in self.samples})
        if not self.samples and self.keys_NSKLE.nbytes + self.values_NSKLE.nbytes > _KEEP_BYTES:
            self._give_back()

    def cut(self, sample: Sample, tokens: int) -> bool:
        """Forget what a sample has cached behind its first tokens; False where a state has gone on, which nothing takes back."""
        if self.states is not None and tokens < sample.cached:
            return False
        slot = self.slot(sample)
        for storage in self._storages:
            storage[:, slot, :, tokens : sample.cached] = 0
        sample.cached = tokens
        return True

    def keep(self, sample: Sample, stem: Stem) -> None:
        """Keep the keys and values of a sample's cached tokens, which are those of `stem`, beyond its release."""
        tokens = len(stem.tokens)
        if not LEAST_SHARED <= tokens <= self._kept_tokens - self._state_tokens:
            return
        for other in self.kept:
            shared = in_common(stem, other.stem)
            # A longer one does as well, but where a state is needed and none is remembered.
            if shared == tokens and (self.states is None or shared == len(other.stem.tokens)):
                self._touch(other)
                return
            if shared == len(other.stem.tokens):
                del self._kept[other]
        slot = self.slot(sample)
        contents = _Contents(tuple(storage[:, slot, :, :tokens].clone() for storage in self._storages), self._beginnings(sample))
        stretches = tuple(beginning.stretch for beginning in contents.beginnings) if self.states is not None else (Stretch(0, tokens),)
        self._kept[Kept(stem, stretches)] = contents
        while len(self._kept) > MAX_KEPT or sum(len(each.stem.tokens) + self._state_tokens for each in self._kept) > self._kept_tokens:
            del self._kept[next(iter(self._kept))]

    def fork(self, source: Sample | Kept, target: Sample, tokens: int) -> None:
        """Copy the keys and values of the first tokens, which both have in common."""
        if isinstance(source, Sample):
            self._copy(self.slot(source), self.slot(target), tokens)
        else:
            slot = self.slot(target)
            for storage, kept_NKTE in zip(self._storages, self._touch(source).storages_NKTE, strict=True):
                storage[:, slot, :, :tokens] = kept_NKTE[:, :, :tokens]
        if self.states is not None:
            beginnings = self._beginnings(source) if isinstance(source, Sample) else self._kept[source].beginnings
            beginning = next((each for each in beginnings if each.stretch.first <= tokens <= each.stretch.last), None)
            if beginning is None:
                raise RuntimeError(f"the plan goes on behind token {tokens}, but no state is kept there: {[each.stretch for each in beginnings]}")
            self.states.begin(self.slot(target), beginning, tokens)
        target.cached = tokens

    def advance(self, sample: Sample, stop: int) -> None:
        """Told before a sample's tokens up to `stop` are computed: where its prompt ends is remembered beyond that."""
        if self.states is not None:
            rows = self.states.rows
            if sample.cached // rows == sample.shared // rows < stop // rows:
                self.states.mark(sample.stem, self.slot(sample), sample.shared)

    def forget_kept(self) -> None:
        """Forget what was kept of sequences that have left."""
        self._kept.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.samples.clear()
        self._kept.clear()
        self._give_back()

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in every placed sample's slot, keeping what is cached."""
        if len(self.samples) > self.keys_NSKLE.shape[1] or length > self.keys_NSKLE.shape[3]:
            # One after the other: the old and the new form of all never exist together.
            self.keys_NSKLE = self._resized(self.keys_NSKLE, length)
            self.values_NSKLE = self._resized(self.values_NSKLE, length)
            self.experts_NSKLE = self._resized(self.experts_NSKLE, length)
            self.expert_weights_NSKLE = self._resized(self.expert_weights_NSKLE, length)
            if self.states is not None and self.states.states_NS.shape[1] != self.keys_NSKLE.shape[1]:
                self.states.resize(self.keys_NSKLE.shape[1])

    def experts(self, sample: Sample, tokens: int) -> NDArray[np.int32]:
        """Where the first tokens of a sample went [T, N, E]."""
        return _numbers(self.experts_NSKLE[:, self.slot(sample), 0, :tokens])

    def expert_weights(self, sample: Sample, tokens: int) -> NDArray[np.float32]:
        """What the answers of these experts were multiplied with [T, N, E]."""
        return _floats(self.expert_weights_NSKLE[:, self.slot(sample), 0, :tokens])

    def last_experts(self, samples: Sequence[Sample]) -> NDArray[np.int32]:
        """Where the last cached token of each sample went [B, N, E]."""
        return _numbers(self._last(self.experts_NSKLE, samples))

    def last_expert_weights(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """What the answers of these experts were multiplied with [B, N, E]."""
        return _floats(self._last(self.expert_weights_NSKLE, samples))

    def _last(self, storage_NSKLE: Tensor, samples: Sequence[Sample]) -> Tensor:
        slots, places = [self.slot(sample) for sample in samples], [sample.cached - 1 for sample in samples]
        return storage_NSKLE[:, slots, 0, places]

    @property
    def _storages(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys_NSKLE, self.values_NSKLE, self.experts_NSKLE, self.expert_weights_NSKLE

    def _beginnings(self, sample: Sample) -> tuple[Beginning, ...]:
        """Where one can go on with the sequence of a placed sample."""
        if self.states is None:
            return ()
        mark = self.states.marked(sample.stem)
        return self.states.beginning(self.slot(sample), sample.cached), *(() if mark is None else (mark,))

    def _touch(self, kept: Kept) -> _Contents:
        contents = self._kept[kept] = self._kept.pop(kept)
        return contents

    def _resized(self, old_NSKLE: Tensor, length: int) -> Tensor:
        layers, old_slots, heads, _, width = old_NSKLE.shape
        places = pad_to(length, KEY_PAD)
        within = self._cache_tokens // (places + self._state_tokens)
        # Twice as many at a time: all copies together are no more than the last one.
        wanted = len(self.samples) if len(self.samples) <= old_slots else max(len(self.samples), 2 * old_slots)
        slots = max(len(self.samples), min(pad_to(wanted, _SLOT_STEP), within))
        new_NSKLE = _zeros((layers, slots, heads, places, width), old_NSKLE)
        for slot, sample in enumerate(self.samples):
            if sample.cached:
                new_NSKLE[:, slot, :, : sample.cached] = old_NSKLE[:, slot, :, : sample.cached]
        return new_NSKLE

    def _give_back(self) -> None:
        config, routing = self._config, self._config.routing
        shape = (len(config.kv_layers), 0, config.num_kv_heads, 0, config.head_dim)
        self.keys_NSKLE = self.values_NSKLE = torch.zeros(shape, dtype=self._dtype, device=self._device)
        shape = (0, 0, 1, 0, 0) if routing is None else (len(routing.sparse_layers), 0, 1, 0, routing.top_k)
        self.experts_NSKLE = torch.zeros(shape, dtype=_EXPERT, device=self._device)
        self.expert_weights_NSKLE = torch.zeros(shape, dtype=self._dtype, device=self._device)
        recurrent = config.recurrent
        self.states = None if recurrent is None else States(config, recurrent, dtype=self._dtype, device=self._device)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for storage in self._storages:
            storage[:, target, :, :tokens] = storage[:, source, :, :tokens]

    def _clear(self, slot: int, tokens: int) -> None:
        for storage in self._storages:
            storage[:, slot, :, :tokens] = 0
        if self.states is not None:
            self.states.clear(slot)


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """On a CPU pages that nobody writes take neither time nor memory: the system knows that they are zero."""
    if not like.is_cpu:
        return like.new_zeros(shape)
    size = math.prod(shape) * like.itemsize
    memory = torch.from_numpy(np.zeros(size + _ALIGNED, np.uint8))
    start = -memory.data_ptr() % _ALIGNED
    return memory[start : start + size].view(like.dtype).view(*shape)


def _numbers(experts_NTE: Tensor) -> NDArray[np.int32]:
    """[T, N, E], on the host."""
    array: NDArray[Any] = experts_NTE.transpose(0, 1).int().cpu().numpy()
    return array


def _floats(weights_NTE: Tensor) -> NDArray[np.float32]:
    """[T, N, E], on the host and in full precision."""
    array: NDArray[Any] = weights_NTE.transpose(0, 1).float().cpu().numpy()
    return array
