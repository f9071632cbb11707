"""The sampler's two implementations of `Attention`: each writes new keys and values to the cache and reads all of a sequence's from there.

Native kernels give a query the same bits as in the trainer, whatever is computed with it. Where torch computes, both give them in an exact form:
query rows are a multiple of `ROW_PAD`, keys a number that the probe found to give those of `KEY_PAD`, masked explicitly.
Shapes: R packed rows, F rows that are no pads, B slots in use, M spans of a team with N rows each, H query heads, K key/value heads, G query heads
per key head, P the same padded, L keys, E head dimension. Of layers with a state S runs or slots, N chunks, T rows of a chunk, L those and the few
before them, X numbers of a row, I that a row reads, C slots whose chunk is full.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bloomery.infer.cache import KeyValueCache
from bloomery.models import native
from bloomery.models.attention import causal_mask
from bloomery.models.form import Form
from bloomery.models.pads import ROW_PAD, pad_to
from bloomery.models.recurrent import Chunks, Recurrence, SequenceRows, gathered


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


def _of_layer(storage: Tensor, k_RKE: Tensor) -> Tensor:
    """The part of a layer's storage [..., K, L, E] that its keys fill: layers can have fewer or narrower ones than the widest."""
    return storage[..., : k_RKE.shape[1], :, : k_RKE.shape[2]]


class _CachedAttention(ABC):
    """Attention of the rows of some spans to what the cache holds of their sequences; rows between spans get zeros, or someone's numbers."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], form: Form) -> None:
        self._cache, self._spans, self._form = cache, spans, form

    def __call__(self, place: int, q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Put keys and values into the cache, and attend."""
        storages = _of_layer(self._cache.keys_NSKLE[place], k_RKE), _of_layer(self._cache.values_NSKLE[place], k_RKE)
        if not native.attends(q_RHE, k_RKE, v_RKE, *storages):
            return self._by_torch(storages, q_RHE, k_RKE, v_RKE, window)
        for storage_SKLE, rows_RKE in zip(storages, (k_RKE, v_RKE), strict=True):
            native.keep(storage_SKLE, rows_RKE, self.spans)
        return native.attend(q_RHE, *storages, self.spans, window)[0]

    @abstractmethod
    def _by_torch(self, storages: tuple[Tensor, Tensor], q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """The same, with keys and values in storages [S, K, L, E]."""

    @cached_property
    def spans(self) -> native.Spans:
        """As kernels take them."""
        return native.Spans.of([(span.row, span.slot, span.start, span.stop - span.start) for span in self._spans])

    @cached_property
    def _fed(self) -> "_Fed":
        fed = [(span.row + token, span.slot, span.start + token) for span in self._spans for token in range(span.stop - span.start)]
        return _Fed(*torch.tensor(fed, device=self._cache.keys_NSKLE.device).unbind(1))


class _Fed(NamedTuple):
    """Every fed token: its row, its slot, and its position in the sequence."""

    rows_F: Tensor
    slots_F: Tensor
    positions_F: Tensor


class _Team(NamedTuple):
    """Spans with as many rows and keys each: they attend in one call."""

    rows: slice | Tensor
    slots: slice | Tensor
    members: int
    keys: int
    masks: _Masks


class ChunkAttention(_CachedAttention):
    """Prefill: each span attends to its own sequence, up to itself."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], form: Form) -> None:
        super().__init__(cache, spans, form)
        self._chunks: _SpanChunks | None = None

    def _by_torch(self, storages: tuple[Tensor, Tensor], q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend team by team."""
        keys_SKLE, values_SKLE = storages
        rows_F, slots_F, positions_F = self._fed
        keys_SKLE[slots_F, :, positions_F] = k_RKE.index_select(0, rows_F)
        values_SKLE[slots_F, :, positions_F] = v_RKE.index_select(0, rows_F)
        out_RHE = torch.zeros_like(q_RHE)
        for team in self._teams:
            q_MHNE = q_RHE[team.rows].unflatten(0, (team.members, -1)).transpose(1, 2)
            k_MKLE, v_MKLE = (storage[team.slots][:, :, : team.keys] for storage in storages)
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
        storage, size = self._cache.keys_NSKLE, spans[0].rows
        positions_MN = torch.tensor([span.start for span in spans], device=storage.device)[:, None] + torch.arange(size, device=storage.device)
        rows = [span.row + row for span in spans for row in range(size)]
        masks = _Masks(lambda window: causal_mask(positions_MN.flatten(), keys, window, storage.dtype).unflatten(0, (len(spans), 1, size)))
        return _Team(_index(rows, storage.device), _index([span.slot for span in spans], storage.device), len(spans), keys, masks)


class _Slots(NamedTuple):
    """How the rows of a decode step stand to the slots in use."""

    in_use: int
    aligned: bool
    """Rows stand in the order of the slots, as they do while all samples have the same weights and decode: they need not be moved."""
    row_by_slot_B: Tensor
    slot_by_row_R: Tensor
    position_by_slot_B: Tensor


class StepAttention(_CachedAttention):
    """Decode: one query row per slot in use."""

    def __init__(self, cache: KeyValueCache, spans: Sequence[Span], rows: int, form: Form) -> None:
        super().__init__(cache, spans, form)
        self.storage = cache.storage
        self._rows = rows
        self._length = form.keys(max(span.stop for span in spans))
        self._masks = _Masks(self._mask)

    def _by_torch(self, storages: tuple[Tensor, Tensor], q_RHE: Tensor, k_RKE: Tensor, v_RKE: Tensor, window: int | None) -> Tensor:
        """Attend all slots in one call, the query heads of a group in the rows of their key head."""
        slots = self._slots
        _, slots_F, positions_F = self._fed
        for storage_SKLE, rows_RKE in zip(storages, (k_RKE, v_RKE), strict=True):
            storage_SKLE[slots_F, :, positions_F] = self._of_fed(rows_RKE)
        heads, kv_heads = q_RHE.shape[1], k_RKE.shape[1]
        group = heads // kv_heads
        q_BHE = q_RHE[: slots.in_use] if slots.aligned else q_RHE.index_select(0, slots.row_by_slot_B)
        q_BKPE = q_BHE.unflatten(1, (kv_heads, group))
        if self._form.exact and group % ROW_PAD:
            q_BKPE = F.pad(q_BKPE, (0, 0, 0, pad_to(group, ROW_PAD) - group))
        mask_BKPL = self._masks[window].expand(-1, -1, q_BKPE.shape[2], -1)
        k_BKLE, v_BKLE = (storage[: slots.in_use, :, : self._length] for storage in storages)
        out_BKPE = F.scaled_dot_product_attention(q_BKPE, k_BKLE, v_BKLE, attn_mask=mask_BKPL)
        out_BHE = out_BKPE[:, :, :group].flatten(1, 2)
        return out_BHE if slots.aligned and self._rows == slots.in_use else out_BHE.index_select(0, slots.slot_by_row_R)

    def recur(self, place: int, mixer: Recurrence, rows_RX: Tensor) -> Tensor:
        """Every fed slot computes its unfinished chunk anew, and goes on to the next when this row was the last of it."""
        states = self._cache.states
        assert states is not None
        state_S, tails_SLX = states.states_NS[place], states.tails_NSLX[place]
        rows_F, slots_F, positions_F = self._fed
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

    def _of_fed(self, tensor_RKE: Tensor) -> Tensor:
        return tensor_RKE[: self._slots.in_use] if self._slots.aligned else tensor_RKE.index_select(0, self._fed.rows_F)

    def _mask(self, window: int | None) -> Tensor:
        return causal_mask(self._slots.position_by_slot_B, self._length, window, self._cache.keys_NSKLE.dtype)[:, None, None]

    @cached_property
    def _slots(self) -> _Slots:
        in_use, (rows_F, slots_F, positions_F) = len(self._cache.samples), self._fed
        aligned = [(span.row, span.slot) for span in self._spans] == [(slot, slot) for slot in range(in_use)]
        # Slots that are not fed (their prompt is half cached) and pad rows take part with someone's numbers; nobody reads the answers.
        nothing_B, nothing_R = slots_F.new_zeros(in_use), slots_F.new_zeros(self._rows)
        return _Slots(
            in_use,
            aligned,
            nothing_B.index_copy(0, slots_F, rows_F),
            nothing_R.index_copy(0, rows_F, slots_F),
            nothing_B.index_copy(0, slots_F, positions_F),
        )


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
