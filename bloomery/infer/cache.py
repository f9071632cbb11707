"""Keys, values and states of all running samples, and of some sequences that have left.

Keys and values lie in blocks of as many places, which `Blocks` counts: a sequence has the blocks that its tokens need, wherever they are, and those
that it begins with may be others' too. Nobody writes into these: whoever goes on in the middle of a block gets a copy of it. States, and the tables
that say which blocks a sequence has, lie in slots 0 to n - 1 without gaps.
Beside those of a token lie the experts that it went to, and what their answers were multiplied with, so that whoever takes over its keys and values
knows them too. These weights are kept in the compute dtype, to which they were rounded before they were used.
Shapes: N layers, B blocks, K key/value heads, P places of a block, T tokens of one sequence, E head dimension; S slots or samples, M blocks of a
slot, F tokens. Of experts N are the sparse layers alone, E the experts per token, and K is 1.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.blocks import NOBODYS, Blocks, blocks_for
from bloomery.infer.plan import Fork, Kept, Sample, Stem
from bloomery.infer.prefixes import Contents, Prefixes
from bloomery.infer.states import Beginning, States
from bloomery.models.config import DecoderConfig
from bloomery.models.memory import large_pages
from bloomery.models.pads import BLOCK_PLACES, KEY_PAD, pad_to
from bloomery.types.errors import reason

log = logging.getLogger(__name__)

_EXPERT: Final = torch.int16
_SLOT_STEP: Final = 8
_TABLE_STEP: Final = KEY_PAD // BLOCK_PLACES
"""Blocks: attention may look at as many places as `KEY_PAD` is, or a multiple of it."""
_FIRST_BYTES: Final = 16 << 20
"""There are blocks for as much at first: where storage moves with their number, on a GPU, what was recorded is of no use then."""
_KEEP_BYTES: Final = 64 << 20
"""Storage of so much more than twice what is kept is worth giving back."""


class Storage(NamedTuple):
    """The memory of keys and values: kernels that got the same find the same there."""

    keys: int
    values: int
    tables: int
    """Addresses."""
    shape: tuple[int, ...]
    tables_shape: tuple[int, ...]

    @property
    def places(self) -> int:
        """Tokens that a table has room for."""
        return self.tables_shape[1] * BLOCK_PLACES


class KeyValueCache:
    """Compact slots, and blocks that come and go with the tokens of who holds them.

    Places that nobody wrote hold zeros: attention masks them, but a NaN left behind by another sample would pass through the mask.
    There are twice as many blocks when more are needed, within `cache_tokens` places in all, or more by what is needed where one sample that runs
    alone needs more. On a CPU, where memory is taken when it is touched, storage has room for all of `cache_tokens` from the first on,
    and moves for one who needs more; elsewhere it moves whenever there are more blocks.
    What is kept of sequences that have left takes `kept_tokens` of these places at most, and makes room for those who run.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", cache_tokens: int = 0, kept_tokens: int = 0
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, torch.device(device)
        self._most_blocks, self._kept_blocks = cache_tokens // BLOCK_PLACES, kept_tokens // BLOCK_PLACES
        self._block_bytes = BLOCK_PLACES * self.bytes_per_token(config, dtype)
        self.samples: list[Sample] = []
        """Who holds slot 0, 1, ..."""
        self.keys_NBKPE: Tensor
        self.values_NBKPE: Tensor
        self.experts_NBKPE: Tensor
        self.expert_weights_NBKPE: Tensor
        self.tables_SM: Tensor
        """The blocks of every slot, always in main memory: kernels look there for keys and values."""
        self.states: States | None
        self._give_back()

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
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.keys_NBKPE.device

    @property
    def kept(self) -> Sequence[Kept]:
        """What can be taken over from sequences that have left."""
        return self._prefixes.kept

    @property
    def storage(self) -> Storage:
        """Where it is at the moment."""
        keys, tables = self.keys_NBKPE, self.tables_SM
        return Storage(keys.data_ptr(), self.values_NBKPE.data_ptr(), tables.data_ptr(), keys.shape, tables.shape)

    def slot(self, sample: Sample) -> int:
        """Where a placed sample lies at the moment."""
        return self.samples.index(sample)

    def place(self, sample: Sample) -> None:
        """Give the next slot to a sample."""
        self.samples.append(sample)
        slots = len(self.samples)
        if slots > len(self.tables_SM):
            self._enlarge_tables(max(slots, 2 * len(self.tables_SM)), self.tables_SM.shape[1])
        if self.states is not None and slots > self.states.states_NS.shape[1]:
            self.states.resize(pad_to(slots, _SLOT_STEP))

    def release(self, sample: Sample) -> None:
        """Free a sample's slot, moving the last sample into it, and let go of its blocks."""
        slot, last = self.slot(sample), len(self.samples) - 1
        self._drop(slot, sample, 0)
        if self.states is not None:
            self.states.clear(slot)
        if slot != last:
            self.samples[slot] = self.samples[last]
            self.tables_SM[slot] = self.tables_SM[last]
            self.tables_SM[last] = NOBODYS
            if self.states is not None:
                self.states.move(last, slot)
                self.states.clear(last)
        self.samples.pop()
        if self.states is not None:
            self.states.retain_marks({sample.stem for sample in self.samples})

    def cut(self, sample: Sample, tokens: int) -> bool:
        """Forget what a sample has cached behind its prompt and some tokens; False where a state has gone on, which nothing takes back."""
        if self.states is not None and tokens < sample.cached:
            return False
        self._drop(self.slot(sample), sample, blocks_for(tokens))
        if filled := tokens % BLOCK_PLACES:
            # Others hold blocks that the prompt fills, and no others.
            for storage in self._storages:
                storage[:, sample.blocks[-1], :, filled:] = 0
        sample.cached = tokens
        return True

    def keep(self, sample: Sample, stem: Stem) -> None:
        """Keep the keys and values of a sample's cached tokens, which are those of `stem`, beyond its release."""
        self._prefixes.keep(stem, sample.blocks[: blocks_for(len(stem.tokens))], self._beginnings(sample))

    def fork(self, forks: Sequence[Fork]) -> None:
        """Let samples begin with the keys and values of the first tokens that each has in common with its source."""
        found = [self._contents(fork) for fork in forks]
        # All at once, before room for a copy is made by letting go of what somebody begins with.
        for contents in found:
            self._blocks.hold(contents.blocks)
        for fork, contents in zip(forks, found, strict=True):
            self._begin(fork.sample, contents, fork.tokens)

    def advance(self, sample: Sample, stop: int) -> None:
        """Told before a sample's tokens up to `stop` are computed: there is room for them then, and where its prompt ends is remembered."""
        if (missing := blocks_for(stop) - len(sample.blocks)) > 0:
            self._append(sample, self._take(missing))
        if self.states is not None:
            rows = self.states.rows
            if sample.cached // rows == sample.shared // rows < stop // rows:
                self.states.mark(sample.stem, self.slot(sample), sample.shared)

    def forget_kept(self) -> None:
        """Forget what was kept of sequences that have left."""
        self._prefixes.clear()

    def shrink(self) -> None:
        """Where no sample is there, give back what no sequence that is kept needs, if it is much."""
        if self.samples or (self._blocks.capacity - 2 * len(self._blocks.held)) * self._block_bytes <= _KEEP_BYTES:
            return
        held = sorted(self._blocks.held)
        if not held:
            self._give_back()
            return
        try:
            self._move(len(held), [NOBODYS, *held])
        except (MemoryError, torch.OutOfMemoryError) as error:
            # There is no room for both, and nobody needs what is kept.
            log.warning("what is kept of prompts is let go of, for there was no memory to move it together: %s", reason(error))
            self._give_back()
            return
        self._prefixes.renumber(self._blocks.close_ranks(len(held)))

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        for sample in self.samples:
            sample.blocks = []
        self.samples.clear()
        self._give_back()

    def find(self, slots_F: Tensor, positions_F: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of the tokens at these positions of the sequences in these slots, and their places there."""
        return self.tables_SM[slots_F, positions_F // BLOCK_PLACES], positions_F % BLOCK_PLACES

    def table(self, slots: Sequence[int], keys: int) -> Tensor:
        """The blocks of so many places of the sequences in these slots [S, M], those behind the end of one are nobody's."""
        return self.tables_SM[list(slots), : blocks_for(keys)].to(self.device)

    def experts(self, sample: Sample, tokens: int) -> NDArray[np.int32]:
        """Where the first tokens of a sample went [T, N, E]."""
        return _numbers(_of_sequence(self.experts_NBKPE, sample, tokens))

    def expert_weights(self, sample: Sample, tokens: int) -> NDArray[np.float32]:
        """What the answers of these experts were multiplied with [T, N, E]."""
        return _floats(_of_sequence(self.expert_weights_NBKPE, sample, tokens))

    def last_experts(self, samples: Sequence[Sample]) -> NDArray[np.int32]:
        """Where the last cached token of each sample went [S, N, E]."""
        return _numbers(_last(self.experts_NBKPE, samples))

    def last_expert_weights(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """What the answers of these experts were multiplied with [S, N, E]."""
        return _floats(_last(self.expert_weights_NBKPE, samples))

    @property
    def _storages(self) -> tuple[Tensor, ...]:
        keys_and_values = self.keys_NBKPE, self.values_NBKPE
        return keys_and_values if self._config.routing is None else (*keys_and_values, self.experts_NBKPE, self.expert_weights_NBKPE)

    def _contents(self, fork: Fork) -> Contents:
        """What a sample begins with."""
        source = fork.source
        contents = Contents(source.blocks, self._beginnings(source)) if isinstance(source, Sample) else self._prefixes.use(source)
        return contents._replace(blocks=contents.blocks[: blocks_for(fork.tokens)])

    def _begin(self, sample: Sample, contents: Contents, tokens: int) -> None:
        """With blocks that are held for it: it keeps those that it fills, and has a part of the last one in a block of its own."""
        whole, filled = divmod(tokens, BLOCK_PLACES)
        self._append(sample, contents.blocks[:whole])
        if filled:
            common, (own,) = contents.blocks[whole], self._take(1)
            for storage in self._storages:
                storage[:, own, :, :filled] = storage[:, common, :, :filled]
            self._append(sample, [own])
            self._blocks.let_go([common])
        if self.states is not None:
            beginning = next((each for each in contents.beginnings if each.stretch.first <= tokens <= each.stretch.last), None)
            if beginning is None:
                known = [each.stretch for each in contents.beginnings]
                raise RuntimeError(f"the plan goes on behind token {tokens}, but no state is kept there: {known}")
            self.states.begin(self.slot(sample), beginning, tokens)
        sample.cached = tokens

    def _beginnings(self, sample: Sample) -> tuple[Beginning, ...]:
        """Where one can go on with the sequence of a placed sample."""
        if self.states is None:
            return ()
        mark = self.states.marked(sample.stem)
        return self.states.beginning(self.slot(sample), sample.cached), *(() if mark is None else (mark,))

    def _append(self, sample: Sample, blocks: Sequence[int]) -> None:
        start, stop = len(sample.blocks), len(sample.blocks) + len(blocks)
        if stop > self.tables_SM.shape[1]:
            self._enlarge_tables(len(self.tables_SM), max(pad_to(stop, _TABLE_STEP), 2 * self.tables_SM.shape[1]))
        sample.blocks += blocks
        self.tables_SM[self.slot(sample), start:stop] = torch.tensor(blocks, dtype=torch.long)

    def _drop(self, slot: int, sample: Sample, left: int) -> None:
        """A sample lets go of all its blocks but the first ones."""
        self._blocks.let_go(sample.blocks[left:])
        self.tables_SM[slot, left : len(sample.blocks)] = NOBODYS
        del sample.blocks[left:]

    def _take(self, count: int) -> list[int]:
        """Blocks of zeros; what was kept makes room for them."""
        while (lacking := count - self._blocks.free) > 0:
            there = self._blocks.capacity
            if there < self._most_blocks:
                self._resize(min(self._most_blocks, max(there + lacking, 2 * there, _FIRST_BYTES // self._block_bytes)))
            elif not self._prefixes.evict():
                # Somewhat more than is needed, or whoever grows block by block would copy all of it each time.
                self._resize(there + max(lacking, there // 4))
        blocks = self._blocks.take(count)
        for first, last in _runs(blocks):
            for storage in self._storages:
                storage[:, first : last + 1] = 0
        return blocks

    def _resize(self, capacity: int) -> None:
        """Have more blocks."""
        if capacity >= self.keys_NBKPE.shape[1]:
            self._move(capacity, slice(0, max(self._blocks.held, default=NOBODYS) + 1))
        self._blocks.grow(capacity)

    # Steps are computed in inference mode, but what is made for longer is written to outside of it as well.
    @torch.inference_mode(False)
    def _move(self, capacity: int, blocks: slice | list[int]) -> None:
        """Into storage for so many blocks at least, nobody's not counted, from the places of these."""
        if self._device.type == "cpu":
            # All that there may be: what nobody has touched takes no memory, and then nothing is copied while streams wait.
            capacity = max(capacity, self._most_blocks)
        # One after the other: the old and the new form of all never exist together.
        self.keys_NBKPE = _moved(self.keys_NBKPE, capacity + 1, blocks)
        self.values_NBKPE = _moved(self.values_NBKPE, capacity + 1, blocks)
        if self._config.routing is not None:
            self.experts_NBKPE = _moved(self.experts_NBKPE, capacity + 1, blocks)
            self.expert_weights_NBKPE = _moved(self.expert_weights_NBKPE, capacity + 1, blocks)

    @torch.inference_mode(False)
    def _enlarge_tables(self, slots: int, blocks: int) -> None:
        old_SM = self.tables_SM
        self.tables_SM = torch.full((slots, blocks), NOBODYS, dtype=torch.long)
        self.tables_SM[: old_SM.shape[0], : old_SM.shape[1]] = old_SM

    def _give_back(self) -> None:
        config, routing = self._config, self._config.routing
        shape = (len(config.kv_layers), 1, config.num_kv_heads, BLOCK_PLACES, config.head_dim)
        self.keys_NBKPE, self.values_NBKPE = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        shape = (0, 0, 1, 0, 0) if routing is None else (len(routing.sparse_layers), 1, 1, BLOCK_PLACES, routing.top_k)
        self.experts_NBKPE = torch.zeros(shape, dtype=_EXPERT, device=self._device)
        self.expert_weights_NBKPE = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.tables_SM = torch.full((_SLOT_STEP, _TABLE_STEP), NOBODYS, dtype=torch.long)
        self._blocks = Blocks()
        self._prefixes = Prefixes(self._blocks, self._kept_blocks, blocks_for(self.state_tokens(config, self._dtype)))
        recurrent = config.recurrent
        self.states = None if recurrent is None else States(config, recurrent, dtype=self._dtype, device=self._device)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as first and last ones of those that follow each other."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _of_sequence(storage_NBKPE: Tensor, sample: Sample, tokens: int) -> Tensor:
    """Of the first tokens [N, T, E] of the only head."""
    return storage_NBKPE[:, sample.blocks[: blocks_for(tokens)], 0].flatten(1, 2)[:, :tokens]


def _last(storage_NBKPE: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Of the last cached tokens [N, S, E] of the only head."""
    whole, places = zip(*(divmod(sample.cached - 1, BLOCK_PLACES) for sample in samples), strict=True)
    blocks = [sample.blocks[block] for sample, block in zip(samples, whole, strict=True)]
    return storage_NBKPE[:, blocks, 0, list(places)]


def _moved(old_NBKPE: Tensor, blocks: int, kept: slice | list[int]) -> Tensor:
    """Storage for so many blocks, of which the first are those that are kept."""
    layers, _, *shape = old_NBKPE.shape
    new_NBKPE = _zeros((layers, blocks, *shape), old_NBKPE)
    if isinstance(kept, slice):
        own = old_NBKPE[:, kept]
        new_NBKPE[:, : own.shape[1]] = own
    else:
        # Without a copy between, which might find no memory.
        torch.index_select(old_NBKPE, 1, torch.tensor(kept, device=old_NBKPE.device), out=new_NBKPE[:, : len(kept)])
    return new_NBKPE


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """On a CPU pages that nobody writes take neither time nor memory: the system knows that they are zero."""
    if not like.is_cpu:
        return like.new_zeros(shape)
    return large_pages(math.prod(shape) * like.itemsize).view(like.dtype).view(*shape)


def _numbers(experts_NTE: Tensor) -> NDArray[np.int32]:
    """[T, N, E], on the host."""
    array: NDArray[Any] = experts_NTE.transpose(0, 1).int().cpu().numpy()
    return array


def _floats(weights_NTE: Tensor) -> NDArray[np.float32]:
    """[T, N, E], on the host and in full precision."""
    array: NDArray[Any] = weights_NTE.transpose(0, 1).float().cpu().numpy()
    return array
