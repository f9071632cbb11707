"""The sampler's two implementations of `Attention`: each writes new keys and values to the cache and reads all of a sequence's from there.

Native kernels give a query the same bits as in the trainer, whatever is computed with it. Where torch computes, both give them in an exact form:
query rows are a multiple of `ROW_PAD`, keys a number that the probe found to give those of `KEY_PAD`, masked explicitly.
Shapes: R packed rows, F rows that are no pads, M spans of a team with N rows each, H query heads, K key/value heads, G query heads per key head, W
the same padded, L keys, E head dimension; of what the cache holds B blocks, P places of each, S slots that are looked at, M blocks of each.
Of layers with a state S runs or slots, N chunks, T rows of a chunk, L those and the few before them, X numbers of a row, I that a row reads, C slots
whose chunk is full.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.infer.blocks import blocks_for
from bloomery.infer.cache import KeyValueCache
from bloomery.models.attention import causal_mask
from bloomery.models.form import Form
from bloomery.models.native import attention as native_attention
from bloomery.models.pads import ROW_PAD, pad_to
from bloomery.models.recurrent import Chunks, Recurrence, SequenceRows, gathered
from bloomery.models.spans import Spans

_NEAR_BYTES: Final = 4 << 20
"""Keys and values that are gathered at a time: what is gathered is read again at once."""


class Span(NamedTuple):
    """Rows `row` and on hold the tokens `start` to `stop` of the sequence in `slot`."""

    row: int
    slot: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Its rows with their pads."""
        return pad_to(self.stop - self.start, ROW_PAD)


class _Masks:
    """One additive mask per attention window, made when a layer first asks for it."""

    def __init__(self, make: Callable[[int | None], Tensor]) -> None:
        self._make = make
        self._made: dict[int | None, Tensor] = {}

    def __getitem__(self, window: int | None) -> Tensor:
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]


class Fed(NamedTuple):
    """Every fed token: its row, its slot, where it lies in the cache, and its position in the sequence."""

    rows_F: Tensor
    slots_F: Tensor
    blocks_F: Tensor
    places_F: Tensor
    positions_F: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], cache: KeyValueCache) -> Self:
        """From their spans."""
        fed = [(span.row + token, span.slot, span.start + token) for span in spans for token in range(span.stop - span.start)]
        rows_F, slots_F, positions_F = torch.tensor(fed).unbind(1)
        found = rows_F, slots_F, *cache.find(slots_F, positions_F), positions_F
        return cls(*(tensor_F.to(cache.device) for tensor_F in found))


def _of_layer(storage_BKPE: Tensor, k_RKE: Tensor) -> Tensor:
    """The part of a layer's storage that its keys fill: layers can have fewer or narrower ones than the widest."""
    return storage_BKPE[:, : k_RKE.shape[1], :, : k_RKE.shape[2]]


def _heads(table_SM: Tensor, heads: int, storage_BKPE: Tensor) -> Tensor:
    """Which of the heads of all blocks are the first ones of these blocks [S, K, M]."""
    return table_SM[:, None] * storage_BKPE.shape[1] + torch.arange(heads, device=table_SM.device)[:, None]


def _gathered(storage_BKPE: Tensor, heads_SKM: Tensor, keys: int, dim: int) -> Tensor:
    """As many keys, or values, of these heads, in one piece [S, K, L, E]."""
    found = storage_BKPE.flatten(0, 1).flatten(1).index_select(0, heads_SKM.flatten())
    return found.view(*heads_SKM.shape[:2], -1, storage_BKPE.shape[3])[:, :, :keys, :dim]


class CachedAttention(ABC):
    """Attention of the rows of some spans to what the cache holds of their sequences; rows between spans get zeros, or someone's numbers."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], form: Form) -> None:
        self._cache, self._spans, self._form = cache, spans, form
        self.storage = cache.storage

    def __call__(self, place: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Put keys and values into the cache, and attend."""
        layers = self._cache.keys_NBKPE[place], self._cache.values_NBKPE[place]
        storages = _of_layer(layers[0], k_RKE), _of_layer(layers[1], k_RKE)
        if native_attention.attends(q_RHE, k_RKE, v_RKE, *storages):
            for storage_BKPE, rows_RKE in zip(storages, (k_RKE, v_RKE), strict=True):
                native_attention.keep(storage_BKPE, rows_RKE, self.spans)
            return native_attention.attend(q_RHE, *storages, self.spans, window)[0]
        fed = self._fed
        for storage_BKPE, rows_RKE in zip(storages, (k_RKE, v_RKE), strict=True):
            storage_BKPE[fed.blocks_F, :, fed.places_F] = self._of_fed(rows_RKE)
        return self._by_torch(q_RHE, k_RKE, layers, window)

    @abstractmethod
    def _by_torch(self, q_RHE: Tensor, k_RKE: Tensor, layers: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        """Attend to what layers [B, K, P, E] hold, in which there are as many keys as in the rows."""

    @abstractmethod
    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """What rows read of the states of a layer, which go on by them."""

    def kept(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the fed tokens in all layers, as the cache has them now."""
        blocks_F, places_F = self._fed.blocks_F, self._fed.places_F
        return self._cache.keys_NBKPE[:, blocks_F, :, places_F], self._cache.values_NBKPE[:, blocks_F, :, places_F]

    @cached_property
    def spans(self) -> Spans:
        """As kernels take them."""
        spans = Spans.of([(span.row, span.slot, span.start, span.stop - span.start) for span in self._spans])
        return spans._replace(tables_SM=self._cache.tables_SM)

    @cached_property
    def _fed(self) -> Fed:
        return Fed.of(self._spans, self._cache)

    def _of_fed(self, tensor_RX: Tensor) -> Tensor:
        return tensor_RX.index_select(0, self._fed.rows_F)


class _Team(NamedTuple):
    """Spans with as many rows and keys each: they attend in one call."""

    rows: slice | Tensor
    table_SM: Tensor
    members: int
    keys: int
    masks: _Masks


class ChunkAttention(CachedAttention):
    """Prefill: each span attends to its own sequence, up to itself."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], form: Form) -> None:
        super().__init__(cache, spans, form)
        self._chunks: _SpanChunks | None = None

    def _by_torch(self, q_RHE: Tensor, k_RKE: Tensor, layers: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        """Team by team."""
        out_RHE = torch.zeros_like(q_RHE)
        for team in self._teams:
            q_MHNE = q_RHE[team.rows].unflatten(0, (team.members, -1)).transpose(1, 2)
            heads_MKL = _heads(team.table_SM, k_RKE.shape[1], layers[0])
            k_MKLE, v_MKLE = (_gathered(layer_BKPE, heads_MKL, team.keys, k_RKE.shape[2]) for layer_BKPE in layers)
            out_MHNE = F.scaled_dot_product_attention(q_MHNE, k_MKLE, v_MKLE, attn_mask=team.masks[window], enable_gqa=True)
            out_RHE[team.rows] = out_MHNE.transpose(1, 2).flatten(0, 1)
        return out_RHE

    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """Each span goes on from the state and the tail of its slot, and leaves its own there; rows between spans come out as zeros."""
        assert self._cache.states is not None
        if self._chunks is None:
            self._chunks = _span_chunks(self._spans, len(rows_RX), mixer, rows_RX.device)
        chunks, slots_S, in_order_S, tail_index_SL = self._chunks
        state_S, tails_SLX = self._cache.states.states_NS[place], self._cache.states.tails_NSLX[place]
        own_SLX = tails_SLX[slots_S]
        read_NTI, states = chunks.scan(mixer, gathered(rows_RX, chunks.index_NL, own_SLX), state_S[in_order_S])
        state_S[in_order_S] = chunks.ends(states)
        tails_SLX[slots_S] = gathered(rows_RX, tail_index_SL, own_SLX)
        read_RI = read_NTI.new_zeros(len(rows_RX), read_NTI.shape[2])
        read_RI[chunks.rows_F] = read_NTI.flatten(0, 1).index_select(0, chunks.places_F)
        return read_RI

    @cached_property
    def _teams(self) -> list[_Team]:
        by_size: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in self._spans:
            by_size[span.rows, self._form.keys(span.stop)].append(span)
        return [self._team(members, keys) for (_, keys), members in by_size.items()]

    def _team(self, spans: Sequence[Span], keys: int) -> _Team:
        device, dtype, size = self._cache.device, self._cache.keys_NBKPE.dtype, spans[0].rows
        positions_MN = torch.tensor([span.start for span in spans], device=device)[:, None] + torch.arange(size, device=device)
        rows = [span.row + row for span in spans for row in range(size)]
        masks = _Masks(lambda window: causal_mask(positions_MN.flatten(), keys, window, dtype).unflatten(0, (len(spans), 1, size)))
        return _Team(_index(rows, device), self._cache.table([span.slot for span in spans], keys), len(spans), keys, masks)


class StepAttention(CachedAttention):
    """Decode: one query row per sample."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], rows: int, form: Form) -> None:
        super().__init__(cache, spans, form)
        self._rows = rows
        self._length = form.keys(max(span.stop for span in spans))
        self._masks = _Masks(self._mask)
        self._found_heads: dict[int, Tensor] = {}

    def _by_torch(self, q_RHE: Tensor, k_RKE: Tensor, layers: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        """The query heads of a group in the rows of their key head; some samples at a time, to as many keys as the longest of these has."""
        kv_heads, group = k_RKE.shape[1], q_RHE.shape[1] // k_RKE.shape[1]
        q_FKWE = self._of_fed(q_RHE).unflatten(1, (kv_heads, group))
        if self._form.exact and group % ROW_PAD:
            q_FKWE = F.pad(q_FKWE, (0, 0, 0, pad_to(group, ROW_PAD) - group))
        mask_FKWL = self._masks[window].expand(-1, -1, q_FKWE.shape[2], -1)
        heads_FKM, together, parts = self._heads(kv_heads), self._near(kv_heads), []
        for first in range(0, len(self._spans), together):
            some = slice(first, first + together)
            keys = self._form.keys(max(span.stop for span in self._spans[some]))
            k_NKLE, v_NKLE = (_gathered(layer_BKPE, heads_FKM[some, :, : blocks_for(keys)], keys, k_RKE.shape[2]) for layer_BKPE in layers)
            parts.append(F.scaled_dot_product_attention(q_FKWE[some], k_NKLE, v_NKLE, attn_mask=mask_FKWL[some, ..., :keys]))
        out_FHE = (parts[0] if len(parts) == 1 else torch.cat(parts))[:, :, :group].flatten(1, 2)
        return out_FHE if self._whole else torch.zeros_like(q_RHE).index_copy(0, self._fed.rows_F, out_FHE)

    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """Every fed slot computes its unfinished chunk anew, and goes on to the next when this row was the last of it."""
        states = self._cache.states
        assert states is not None
        state_S, tails_SLX = states.states_NS[place], states.tails_NSLX[place]
        rows_F, slots_F, _, _, positions_F = self._fed
        within_F = positions_F % states.rows
        tails_SLX[slots_F, states.earlier + within_F] = rows_RX.index_select(0, rows_F)
        intra = mixer.intra_chunk(tails_SLX[slots_F])
        read_FTI, _ = mixer.inter_chunk(intra, state_S[slots_F], 0)
        if len(full_C := torch.where(within_F == states.rows - 1)[0]):
            slots_C = slots_F[full_C]
            state_S[slots_C] = mixer.inter_chunk([part[full_C] for part in intra], state_S[slots_C], len(full_C)).state_N
            tails_SLX[slots_C, : states.earlier] = tails_SLX[slots_C, states.rows :]
        read_RI = read_FTI.new_zeros(self._rows, read_FTI.shape[2])
        read_RI[rows_F] = read_FTI[torch.arange(len(within_F), device=within_F.device), within_F]
        return read_RI

    def _of_fed(self, tensor_RX: Tensor) -> Tensor:
        return tensor_RX if self._whole else super()._of_fed(tensor_RX)

    def _mask(self, window: int | None) -> Tensor:
        return causal_mask(self._fed.positions_F, self._length, window, self._cache.keys_NBKPE.dtype)[:, None, None]

    @cached_property
    def _whole(self) -> bool:
        """Whether every row is fed, in the order of the spans: none need be moved."""
        return [span.row for span in self._spans] == list(range(self._rows))

    def _heads(self, kv_heads: int) -> Tensor:
        """Those of all samples [F, K, M]."""
        if kv_heads not in self._found_heads:
            table_FM = self._cache.table([span.slot for span in self._spans], self._length)
            self._found_heads[kv_heads] = _heads(table_FM, kv_heads, self._cache.keys_NBKPE[0])
        return self._found_heads[kv_heads]

    def _near(self, kv_heads: int) -> int:
        """Samples whose keys and values stay in the processor's cache until they are used."""
        keys_NBKPE = self._cache.keys_NBKPE
        if not keys_NBKPE.is_cpu:
            return len(self._spans)
        return max(1, _NEAR_BYTES // (2 * kv_heads * self._length * keys_NBKPE.shape[4] * keys_NBKPE.itemsize))


class _SpanChunks(NamedTuple):
    """The chunks of some spans, their slots in the order of the spans and in that of the chunks, and where their new tails are gathered from."""

    chunks: Chunks
    slots_S: Tensor
    in_order_S: Tensor
    tail_index_SL: Tensor


def _span_chunks(spans: Sequence[Span], rows: int, mixer: Recurrence, device: torch.device) -> _SpanChunks:
    sequences = [SequenceRows(span.row, span.stop - span.start, span.start % mixer.config.chunk_rows) for span in spans]
    chunks = Chunks(sequences, rows, mixer.config, device, tails=True)
    slots_S = torch.tensor([span.slot for span in spans], device=device)
    return _SpanChunks(chunks, slots_S, slots_S[chunks.order], chunks.tail_index())


def _index(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """Ascending places without gaps as a slice, which copies nothing."""
    if list(places) == list(range(places[0], places[0] + len(places))):
        return slice(places[0], places[0] + len(places))
    return torch.tensor(places, device=device)
