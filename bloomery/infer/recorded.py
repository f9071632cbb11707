"""Decode steps, and on a processor prefills of few rows, that are computed by programs (`models/program`), on a GPU by graphs (`captured`): recorded
when one comes a second time, held against the ordinary code when it comes again, and from then on computed in one call.

Steps are alike that have as many rows and spans, the same rows that are wanted, the same weights for the same rows, and their keys and values in the
same memory; tokens, positions, the slots of the spans and the blocks of these change from step to step, and are put where the program looks. Where a
model is small a step takes as long between its kernels as in them; a program has nothing between them, and the same bits, for it is made of the same
calls. With other weights in the same layout, as after a swap, these calls differ in addresses alone: a processor's program is moved to them, so that
nobody who is in the middle of an answer waits until it is recorded anew, and a step that every version takes once is recorded too. The first that is
moved is held against the ordinary code; those that are moved from it are not.
Shapes: R rows, D hidden.
"""

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple, Self
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from bloomery.infer.attention import CachedAttention, StepAttention
from bloomery.infer.captured import CapturedStep, weights_of
from bloomery.models.adapters import AdapterRows
from bloomery.models.decoder import Decoder, Inputs, Wanted
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.gpu import launch
from bloomery.models.native import bindings, gemm
from bloomery.models.program import Move, Program, Recorder, Workspace
from bloomery.models.spans import Spans
from bloomery.types.errors import reason

log = logging.getLogger(__name__)

MAX_KEPT: Final = 256
"""Programs, graphs, and steps that might come again: of every number of rows, under some compositions of adapters."""
FEW_ROWS: Final = 128
"""Of a prefill that may come again: with more of them kernels take so long that nothing between them counts."""
_LEAST_ADDRESS: Final = 1 << 32
"""Of what a program may be moved from: counts, strides and the bits of floats are less."""


class _Memory(NamedTuple):
    """Where the weights of a step lie, and all else that its calls take for granted of them."""

    layout: tuple[Hashable, ...]
    places: tuple[tuple[int, int], ...]
    """Addresses and bytes of all tensors."""

    @classmethod
    def of(cls, weights: Sequence[Decoder | FusedAdapter]) -> Self:
        """Of a decoder, and of adapters in the order of their rows: where one comes twice, one does in every step that is alike."""
        distinct = list(dict.fromkeys(weights))
        parts = [_part(each) for each in distinct]
        return cls((tuple(map(distinct.index, weights)), *(part.layout for part in parts)), tuple(chain.from_iterable(part.places for part in parts)))

    def may_become(self, other: "_Memory") -> bool:
        """Whether a program for these weights can be moved to others: in the same layout, at addresses that no other number is as large as."""
        return self.layout == other.layout and all(start >= _LEAST_ADDRESS for start, _ in self.places)

    def moves_to(self, other: "_Memory") -> list[Move]:
        """What makes a program for these weights one for others in the same layout."""
        pairs = zip(self.places, other.places, strict=True)
        return [Move(start, size_bytes, new_start) for (start, size_bytes), (new_start, _) in pairs if start != new_start]


_parts: Final[WeakKeyDictionary[Decoder | FusedAdapter, _Memory]] = WeakKeyDictionary()
"""Of each alone: it stays where it is, which programs rely on, and is asked for in every kind of step of a new version."""


def _part(weights: Decoder | FusedAdapter) -> _Memory:
    if (known := _parts.get(weights)) is None:
        tensors = list(chain(weights.parameters(), weights.buffers()) if isinstance(weights, Decoder) else weights.tensors)
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        kind = weights.config if isinstance(weights, Decoder) else weights.layout
        known = _parts[weights] = _Memory((kind, shapes), tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors))
    return known


class _Once(NamedTuple):
    """A step that came, and was not recorded."""

    weights: tuple[ReferenceType[Any], ...]
    memory: _Memory


@dataclass(slots=True)
class _Recorded:
    """A program, what it reads anew each time, and where it leaves the hidden states."""

    program: Program
    inputs: Inputs
    spans: Spans
    hidden_RD: Tensor
    weights: tuple[ReferenceType[Any], ...]
    """The decoder and adapters whose memory the program names; it keeps none of them alive."""
    memory: _Memory
    proved: bool = False
    """Whether it has given the bits of a step that was computed without it, or one that was moved as it was has."""
    was_moved: bool = False

    def again(self, decoder: Decoder, tokens_R: Tensor, positions_R: Tensor, attention: CachedAttention) -> Tensor:
        """With other tokens."""
        self.inputs.take_over(decoder.inputs(tokens_R, positions_R))
        self.spans.places_N4.copy_(attention.spans.places_N4)
        self.program.run(bindings.run)
        return self.hidden_RD

    def moved(self, weights: Sequence[object], memory: _Memory) -> "_Recorded":
        """The program of a step that differs in its weights alone; it leaves the hidden states in the same place."""
        program = self.program.moved(self.memory.moves_to(memory))
        return replace(self, program=program, weights=tuple(map(ref, weights)), memory=memory, proved=self.was_moved, was_moved=True)


class RecordedSteps:
    """The programs of one sampler, whose steps come one after the other."""

    def __init__(self) -> None:
        self.replayed = 0
        """Steps that programs, or graphs, computed."""
        self._workspace = Workspace()
        self._pool: Any = None
        """Memory of the graphs of a GPU."""
        self._kept: OrderedDict[tuple[tuple[int, ...], Hashable], _Recorded | CapturedStep | _Once] = OrderedDict()
        """By their weights and what else makes steps alike. The longest unused first."""
        self._unrecordable: WeakSet[Decoder] = WeakSet()
        """Models that compute something without kernels of ours."""

    def forget(self) -> None:
        """Let go of all of them."""
        self._kept.clear()
        self._workspace, self._pool = Workspace(), None

    def hidden(
        self,
        decoder: Decoder,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: CachedAttention,
        adapters: AdapterRows,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Hidden states [R, D] of a step, or of the wanted rows of a prefill, until the next one."""
        # Whoever makes another class of it may do more than compute.
        is_plain = type(decoder) is Decoder and decoder not in self._unrecordable and _has_own_kernels(decoder)
        if not is_plain or not _comes_again(attention, tokens_R, wanted):
            return decoder.hidden(tokens_R, positions_R, attention, adapters, wanted=wanted)
        weights = weights_of(decoder, adapters)
        segments = tuple((start, stop, adapter is None) for adapter, start, stop in adapters.segments)
        alike = segments, _shape(attention, wanted), attention.storage, torch.get_num_threads()
        step = tuple(map(id, weights)), alike
        kept: _Recorded | CapturedStep | _Once | None = self._kept.get(step)
        if kept is not None and not _is_of(kept, weights):
            kept = None
        if tokens_R.is_cpu and not isinstance(kept, _Recorded):
            kept = self._of_others(alike, weights)
        recorded: _Recorded | CapturedStep | None
        if isinstance(kept, _Once) and tokens_R.is_cpu:
            hidden_RD, recorded = self._record(decoder, tokens_R, positions_R, attention, adapters, wanted)
        elif isinstance(kept, _Once):
            hidden_RD, recorded = self._capture(decoder, tokens_R, positions_R, attention, adapters)
        elif kept is not None:
            hidden_RD, recorded = kept.again(decoder, tokens_R, positions_R, attention), kept
            if not kept.proved:
                hidden_RD, recorded = self._prove(kept, hidden_RD, decoder, tokens_R, positions_R, attention, adapters, wanted)
            self.replayed += 1
        else:
            hidden_RD, recorded = decoder.hidden(tokens_R, positions_R, attention, adapters, wanted=wanted), None
        self._kept[step] = recorded or _Once(tuple(map(ref, weights)), _Memory.of(weights))
        self._kept.move_to_end(step)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return hidden_RD

    def _of_others(self, alike: Hashable, weights: Sequence[Decoder | FusedAdapter]) -> _Recorded | _Once | None:
        """Of a step that is alike but for its weights, in the same layout: its program for these weights, of the last that was moved, which needs no
        proof, or of another; else that it came."""
        memory, unmoved, once = None, None, None
        for (_, other), kept in reversed(self._kept.items()):
            if other != alike or isinstance(kept, CapturedStep):
                continue
            memory = memory or _Memory.of(weights)
            if isinstance(kept, _Once):
                once = once or (kept if kept.memory.layout == memory.layout else None)
            elif kept.memory.may_become(memory):
                if kept.was_moved:
                    return kept.moved(weights, memory)
                unmoved = unmoved or kept
        return unmoved.moved(weights, memory) if unmoved is not None and memory is not None else once

    def _prove(
        self,
        recorded: _Recorded | CapturedStep,
        found_RD: Tensor,
        decoder: Decoder,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: CachedAttention,
        adapters: AdapterRows,
        wanted: Wanted | None,
    ) -> tuple[Tensor, _Recorded | CapturedStep | None]:
        """Compute without the program what it has given. Keys and values are put where they lie already, with the bits that they have."""
        kept = attention.kept()
        hidden_RD = decoder.hidden(tokens_R, positions_R, attention, adapters, wanted=wanted)
        recorded.proved = torch.equal(found_RD, hidden_RD) and all(map(torch.equal, kept, attention.kept()))
        if recorded.proved:
            return hidden_RD, recorded
        log.error("a program gave other bits than the step that it is for: steps of this model are computed call by call")
        self._unrecordable.add(decoder)
        return hidden_RD, None

    def _capture(
        self, decoder: Decoder, tokens_R: Tensor, positions_R: Tensor, attention: CachedAttention, adapters: AdapterRows
    ) -> tuple[Tensor, CapturedStep | None]:
        """Compute it, and have a GPU keep how."""
        hidden_RD = decoder.hidden(tokens_R, positions_R, attention, adapters)
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        try:
            return hidden_RD, CapturedStep(decoder, tokens_R, positions_R, attention, adapters, self._pool)
        except torch.OutOfMemoryError:
            # There may be room when it comes again.
            return hidden_RD, None
        except RuntimeError as error:
            log.warning("steps of this model are computed call by call: its kernels form no graph: %s", reason(error))
            self._unrecordable.add(decoder)
            return hidden_RD, None

    def _record(
        self,
        decoder: Decoder,
        tokens_R: Tensor,
        positions_R: Tensor,
        attention: CachedAttention,
        adapters: AdapterRows,
        wanted: Wanted | None,
    ) -> tuple[Tensor, _Recorded | None]:
        """Compute it, and write down how."""
        inputs, weights = decoder.inputs(tokens_R, positions_R), weights_of(decoder, adapters)
        # As long as sequences can become before they lie somewhere else.
        spans = attention.spans = attention.spans._replace(longest=attention.storage.places)
        with Recorder(self._workspace) as recorder:
            hidden_RD = decoder.hidden_of(inputs, attention, adapters, wanted=wanted)
        if recorder.refused is not None:
            log.info("steps of this model are computed call by call: no program computes %s", recorder.refused)
            self._unrecordable.add(decoder)
            return hidden_RD, None
        return hidden_RD, _Recorded(Program(recorder.calls), inputs, spans, hidden_RD, tuple(map(ref, weights)), _Memory.of(weights))


def _has_own_kernels(decoder: Decoder) -> bool:
    """Whether all of a step may be computed by them; of a GPU's states nobody knows before where they end."""
    return gemm.multiplies(decoder.embedding) or (launch.available(decoder.embedding) and decoder.config.recurrent is None)


def _comes_again(attention: CachedAttention, tokens_R: Tensor, wanted: Wanted | None) -> bool:
    """Whether a step as it is may be one of many: on a processor every decode step, and a prefill of which neighbours are wanted."""
    if not tokens_R.is_cpu:
        return isinstance(attention, StepAttention) and attention.spans.tokens == len(tokens_R)
    return wanted is None or isinstance(wanted.rows, slice)


def _shape(attention: CachedAttention, wanted: Wanted | None) -> tuple[Hashable, ...]:
    """What calls are told of a step's rows beside whose weights are theirs."""
    rows = wanted.rows if wanted is not None and isinstance(wanted.rows, slice) else None
    return len(attention.spans.places_N4), None if rows is None else (rows.start, rows.stop)


def _is_of(recorded: _Recorded | CapturedStep | _Once, weights: tuple[object, ...]) -> bool:
    """And not of others that had the same place."""
    return all(old() is new for old, new in zip(recorded.weights, weights, strict=True))
