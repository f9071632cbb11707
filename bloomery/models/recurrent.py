"""Layers whose rows learn of those before them through a state, which is scanned chunk by chunk.

A scan has two parts: what a chunk gives by itself (intra-chunk, all chunks at once), and what it reads of the state before it and leaves in the one
behind it (inter-chunk, one chunk of every sequence after the other). Chunks begin at multiples of `chunk_rows` of a sequence, in training and in
sampling: both sum in the same order. Whoever computes a row computes its whole chunk, with anything finite behind the last row that is there; so
every product has one shape, and a row's bits depend neither on rows behind it nor on other chunks. `kernel_probe` holds that against this machine.
Shapes: R packed rows, X scan inputs of a row, S sequences, N chunks, T rows of a chunk, W width of the convolution, L those of a chunk and the W - 1
before it, I numbers that a row reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bloomery.models.config import RecurrentConfig


class InterChunk(NamedTuple):
    """What the rows of some chunks read [N, T, I], and the states behind those chunks that are carried on."""

    read_NTI: Tensor
    state_N: Tensor


class Scan(NamedTuple):
    """What the rows of all chunks read [N, T, I], and the states before the first chunk of all sequences, before the second of those that filled the
    first, and so on."""

    read_NTI: Tensor
    states: list[Tensor]


class Recurrence(nn.Module, ABC):
    """One layer's mixer, between its two projections."""

    config: RecurrentConfig

    @abstractmethod
    def scan_inputs(self, projected_RO: Tensor) -> Tensor:
        """What later rows of the same chunk must know of a row, and of the last `W - 1` before the chunk [R, X]."""

    @abstractmethod
    def intra_chunk(self, rows_NLX: Tensor) -> tuple[Tensor, ...]:
        """All of N chunks that can be computed without a state: a NamedTuple of tensors with N as their first dimension."""

    @abstractmethod
    def inter_chunk(self, intra: Sequence[Tensor], state_N: Tensor, carried: int) -> InterChunk:
        """One chunk of each of N sequences, behind the float32 states `state_N`; the first `carried` chunks are full, and their sequences go on.

        `intra` is what `intra_chunk` gave of these chunks.
        """

    @abstractmethod
    def gated(self, read_RI: Tensor, projected_RO: Tensor) -> Tensor:
        """What goes to the output projection [R, I], in the compute dtype."""


class SequenceRows(NamedTuple):
    """Rows `row` to `row + rows` of a pass are one sequence's; `before` rows of the chunk that they go on with came earlier."""

    row: int
    rows: int
    before: int = 0

    @property
    def stop(self) -> int:
        """Behind the last row, counted from the begin of that chunk."""
        return self.before + self.rows


class Chunks:
    """The sequences of a pass, cut into chunks: the first of all sequences, then the second of those that have one, and so on; the longest first.

    Chunks are gathered from the rows of the pass, then, where sequences go on with a chunk, from the inputs of its earlier rows (`tails`, [S, L, X]),
    then from a row of zeros, which stands for what is before a sequence and behind its rows.
    """

    def __init__(self, sequences: Sequence[SequenceRows], rows: int, config: RecurrentConfig, device: torch.device | str, *, tails: bool) -> None:
        self._sequences, self._rows, self._tails = sequences, rows, tails
        self._size, self.earlier = config.chunk_rows, config.conv_width - 1
        size = self._size
        self.order = sorted(range(len(sequences)), key=lambda number: -sequences[number].stop)
        """The sequences, as `state_S` is ordered."""
        stops = np.array([sequences[number].stop for number in self.order])
        count = -(-int(stops[0]) // size)
        self.sizes = [int((stops > number * size).sum()) for number in range(count)]
        """How many sequences have a first chunk, a second, and so on."""
        self._full = [int((stops >= (number + 1) * size).sum()) for number in range(count)]
        self._ends = (stops // size).tolist()
        places = [(rank, number) for number, having in enumerate(self.sizes) for rank in range(having)]
        index_NL = np.stack([self._line(self.order[rank], number) for rank, number in places])
        self.index_NL = torch.from_numpy(index_NL).to(device)
        """Where each row of a chunk is gathered from."""
        own_NT = index_NL[:, self.earlier :]
        place_of_row = np.full(rows, -1)
        is_row = own_NT.ravel() < rows
        place_of_row[own_NT.ravel()[is_row]] = np.flatnonzero(is_row)
        self.rows_F = torch.from_numpy(np.flatnonzero(place_of_row >= 0)).to(device)
        """The rows that belong to a sequence."""
        self.places_F = torch.from_numpy(place_of_row[place_of_row >= 0]).to(device)
        """And their places in the chunks, one after the other."""

    def tail_index(self) -> Tensor:
        """Where the tail behind each sequence is gathered from [S, L], in the order in which they were given."""
        lines = [self._line(number, sequence.stop // self._size) for number, sequence in enumerate(self._sequences)]
        return torch.from_numpy(np.stack(lines)).to(self.index_NL.device)

    def scan(self, mixer: Recurrence, rows_NLX: Tensor, state_S: Tensor) -> Scan:
        """From the states before the first chunks on."""
        by_number = zip(*(part.split(self.sizes) for part in mixer.intra_chunk(rows_NLX)), strict=True)
        read, states = [], [state_S]
        for intra, size, full in zip(by_number, self.sizes, self._full, strict=True):
            read_NTI, state_N = mixer.inter_chunk(intra, states[-1][:size], full)
            read.append(read_NTI)
            states.append(state_N)
        return Scan(read[0] if len(read) == 1 else torch.cat(read), states)

    def ends(self, states: Sequence[Tensor]) -> Tensor:
        """The state behind the last full chunk of each sequence."""
        return torch.stack([states[number][rank] for rank, number in enumerate(self._ends)])

    def _line(self, number: int, chunk: int) -> NDArray[np.int64]:
        """Where the rows of a sequence's chunk are gathered from, those before it included."""
        sequence, length = self._sequences[number], self.earlier + self._size
        places = np.arange(chunk * self._size - self.earlier, (chunk + 1) * self._size)
        line = np.full(length, self._rows + self._tails * len(self._sequences) * length)
        own = (places >= sequence.before) & (places < sequence.stop)
        line[own] = sequence.row + places[own] - sequence.before
        if self._tails:
            tail = places < sequence.before
            line[tail] = self._rows + number * length + places[tail] + self.earlier
        return line


def packed_scan(mixer: Recurrence, rows_RX: Tensor, chunks: Chunks) -> Tensor:
    """What every row reads of whole sequences that begin in this pass [R, I]."""
    rows_NLX: Tensor = _ToChunks.apply(rows_RX, chunks)  # type: ignore[no-untyped-call]
    state_S = torch.zeros(len(chunks.order), *mixer.config.state_shape, device=rows_RX.device)
    read_RI: Tensor = _ToRows.apply(chunks.scan(mixer, rows_NLX, state_S).read_NTI, chunks)  # type: ignore[no-untyped-call]
    return read_RI


def gathered(rows_RX: Tensor, index_NL: Tensor, tails_SLX: Tensor | None = None) -> Tensor:
    """Rows of the pass, of `tails_SLX` and of zeros, by the index of `Chunks` [N, L, X]."""
    others = [rows_RX.new_zeros(1, rows_RX.shape[1])] if tails_SLX is None else [tails_SLX.flatten(0, 1), rows_RX.new_zeros(1, rows_RX.shape[1])]
    chunks_NLX: Tensor = torch.cat([rows_RX, *others]).index_select(0, index_NL.flatten()).unflatten(0, index_NL.shape)
    return chunks_NLX


def convolved(rows_NLX: Tensor, weight_XW: Tensor) -> Tensor:
    """The causal convolution of every channel by itself [N, T, X], of T rows behind `W - 1` others."""
    width = weight_XW.shape[1]
    rows = rows_NLX.shape[1] - width + 1
    mixed_NTX = rows_NLX[:, :rows] * weight_XW[:, 0]
    for place in range(1, width):
        # In place, and no convolution's kernel, which treats few chunks otherwise than many.
        mixed_NTX.addcmul_(rows_NLX[:, place : place + rows], weight_XW[:, place])
    return mixed_NTX


class _ToChunks(torch.autograd.Function):
    """Rows to chunks. A row is in one chunk, and at most once more among the rows before another."""

    @staticmethod
    def forward(ctx: Any, rows_RX: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        return gathered(rows_RX, chunks.index_NL)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_NLX,), chunks = grads, ctx.chunks
        grad_RX = grad_NLX[:, chunks.earlier :].flatten(0, 1).index_select(0, chunks.places_F)
        earlier_P = chunks.index_NL[:, : chunks.earlier].flatten()
        real_P = torch.where(earlier_P < len(grad_RX))[0]
        return grad_RX.index_add_(0, earlier_P[real_P], grad_NLX[:, : chunks.earlier].flatten(0, 1)[real_P]), None


class _ToRows(torch.autograd.Function):
    """What chunks read, back to rows; pads are dropped."""

    @staticmethod
    def forward(ctx: Any, read_NTI: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        return read_NTI.flatten(0, 1).index_select(0, chunks.places_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gathered(grads[0], ctx.chunks.index_NL[:, ctx.chunks.earlier :]), None
