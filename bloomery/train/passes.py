"""One forward, and one backward, over micro-batches of several runs.

A pass computes the base model once for the rows of all its shares, but what follows the last attention apart for the rows that learn and for others,
of which nobody needs a backward; where only metrics are asked for, rows without loss are not finished. Each run keeps the numbers that it has alone:
rows are padded by their own sequence, an adapter applies to its own range of rows, and terms and factors of a run are reduced over its own rows in
their own order.
Shapes: R packed rows, D hidden, K soft targets per row.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder, Trunk
from bloomery.models.experts import Routing
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.head import HeadRows, pooled_logprobs
from bloomery.models.pads import ROW_PAD, pad_to
from bloomery.models.targets import UNEMBED
from bloomery.train.batch import MicroBatch
from bloomery.train.losses import Loss
from bloomery.train.trainable import Trainable


class Share(NamedTuple):
    """One run's part of a pass: a micro-batch, and what to do with it."""

    weights: Trainable
    packed: MicroBatch
    loss: Loss
    backward: bool
    routing: bool = False
    """Whether to tell which experts the rows went to, and what these were weighed with."""
    logprobs: bool = True
    """Whether those of rows without loss are wanted."""

    @property
    def exact(self) -> bool:
        """Whether its log-probabilities are to have the sampler's bits, from whose attention they come then."""
        return exact_attention(self.loss.exact, self.backward)

    @property
    def rows(self) -> int:
        """Packed rows, padding included."""
        return len(self.packed.tokens_R)


def exact_attention(exact_loss: bool, backward: bool) -> bool:
    """Whether attention is the sampler's: where the loss asks for its bits, and wherever nothing is learned."""
    return exact_loss or not backward


def goes_with(share: Share, other: Share) -> bool:
    """Whether both can be in one pass: it has one decoder, and a backward for all or for none."""
    return share.weights.decoder is other.weights.decoder and share.backward == other.backward


class Computed(NamedTuple):
    """What a share gave, on the host."""

    logprobs_RK: Tensor
    """0 in rows whose log-probabilities are not wanted."""
    routing_RLT: Tensor | None
    """Experts int32 of each of the L sparse layers, where that was asked."""
    routing_weights_RLT: Tensor | None
    """What their answers were multiplied with, float32, where it was."""


def compute(shares: Sequence[Share]) -> list[Computed]:
    """Log-probabilities of each share's rows; with `backward` the gradients of its loss are left at the run's copies, not yet gathered."""
    decoder, backward = shares[0].weights.decoder, shares[0].backward
    for share in shares:
        share.weights.discard_ungathered()
    with torch.set_grad_enabled(backward):
        places = _lay_out(shares, decoder.device)
        routing = _given(places)
        ending = _Ending(decoder, _trunk(decoder, places, routing), _segments(places), routing)
        learning = [place.learning for place in places]
        learned = _logprobs(ending, places, learning)
        terms = [_terms(place, rows, logprobs) for place, rows, logprobs in zip(places, learning, learned, strict=True) if len(rows)]
        with torch.no_grad():
            others = [place.others for place in places]
            unlearned = _logprobs(ending, places, others)
        if terms:
            torch.autograd.backward(terms, [torch.ones_like(term) for term in terms])
    results = []
    for number, place in enumerate(places):
        logprobs_RK = torch.zeros(place.packed.targets_RK.shape, device=decoder.device)
        logprobs_RK[learning[number]] = learned[number].detach()
        logprobs_RK[others[number]] = unlearned[number]
        results.append(Computed(logprobs_RK.cpu(), *(_told(routing, place) if place.share.routing else (None, None))))
    return results


class _Place(NamedTuple):
    """A share on the device, and where its rows are among all."""

    share: Share
    packed: MicroBatch
    adapter: FusedAdapter | None
    start: int

    @property
    def learning(self) -> Tensor:
        """Numbers of the rows that get a gradient."""
        return torch.where(self._counts_R & self.share.backward)[0]

    @property
    def others(self) -> Tensor:
        """Numbers of the rows of which nothing but the log-probability is wanted."""
        wanted_R = self.packed.real_R if self.share.logprobs else self._counts_R
        return torch.where(wanted_R & ~(self._counts_R & self.share.backward))[0]

    @property
    def _counts_R(self) -> Tensor:
        """Which rows the loss looks at."""
        return self.share.loss.learns(self.packed.inputs) & self.packed.real_R


def _lay_out(shares: Sequence[Share], device: torch.device) -> list[_Place]:
    places, start = [], 0
    for share in shares:
        places.append(_Place(share, share.packed.to(device), share.weights.fused(), start))
        start += share.rows
    return places


def _given(places: Sequence[_Place]) -> Routing:
    """What data say of where their rows go."""
    experts = _at_all_rows([(place.packed.routing_RLT, place.share.rows) for place in places], -1)
    return Routing(experts, _at_all_rows([(place.packed.routing_weights_RLT, place.share.rows) for place in places], math.nan))


def _at_all_rows(given: Sequence[tuple[Tensor | None, int]], missing: float) -> Tensor | None:
    """What shares of so many rows say of them [R, L, T], and `missing` in all others; None where none says anything."""
    example = next((values for values, _ in given if values is not None), None)
    if example is None:
        return None
    return torch.cat([example.new_full((rows, *example.shape[1:]), missing) if values is None else values for values, rows in given])


def _told(routing: Routing, place: _Place) -> tuple[Tensor, Tensor]:
    """Experts of a share's rows, and what their answers were multiplied with."""
    rows = slice(place.start, place.start + place.share.rows)
    return routing.chosen_RLT[rows].int().cpu(), routing.weights_RLT[rows].float().cpu()


def _trunk(decoder: Decoder, places: Sequence[_Place], routing: Routing) -> Trunk:
    """Of all rows."""
    lengths = [length for place in places for length in place.packed.lengths]
    exact = [place.share.exact for place in places for _ in place.packed.lengths]
    attention = PackedAttention(lengths, exact=exact, device=decoder.device)
    tokens_R = torch.cat([place.packed.tokens_R for place in places])
    positions_R = torch.cat([place.packed.positions_R for place in places])
    return decoder.trunk(decoder.inputs(tokens_R, positions_R), attention, _segments(places), routing)


def _segments(places: Sequence[_Place]) -> AdapterRows:
    return AdapterRows(tuple((place.adapter, place.start, place.start + place.share.rows) for place in places))


class _Ending:
    """What follows the last attention, for whichever rows are asked for; experts there are told of all rows at once."""

    def __init__(self, decoder: Decoder, trunk: Trunk, adapters: AdapterRows, routing: Routing) -> None:
        self.decoder, self._trunk, self._routing = decoder, trunk, routing
        self._whole_RD = decoder.finish(trunk, adapters, routing) if decoder.ends_sparse else None

    def hidden(self, rows_C: Tensor, adapters: AdapterRows) -> Tensor:
        """Hidden states of these rows, to which the adapters apply in this order."""
        if self._whole_RD is not None:
            return self._whole_RD.index_select(0, rows_C)
        return self.decoder.finish(self._trunk.rows(rows_C), adapters, self._routing)


def _terms(place: _Place, rows: Tensor, logprobs: Tensor) -> Tensor:
    inputs = {name: values[rows] for name, values in place.packed.inputs.items()}
    return place.share.loss.terms(logprobs, inputs, place.packed.sequence_R[rows])


def _logprobs(ending: _Ending, places: Sequence[_Place], chosen: Sequence[Tensor]) -> list[Tensor]:
    """Log-probabilities [rows, K] of chosen rows of every place; places with the same K share their products."""
    found = [place.packed.targets_RK.new_zeros((0, place.packed.targets_RK.shape[1]), dtype=torch.float32) for place in places]
    by_width: dict[int, list[int]] = defaultdict(list)
    for number, (place, rows) in enumerate(zip(places, chosen, strict=True)):
        if len(rows):
            by_width[place.packed.targets_RK.shape[1]].append(number)
    for numbers in by_width.values():
        segments, adapters, indices, targets, start = [], [], [], [], 0
        for number in numbers:
            place, rows = places[number], chosen[number]
            padded = torch.cat([rows, rows[:1].expand(pad_to(len(rows), ROW_PAD) - len(rows))])
            factors = None if place.adapter is None else place.adapter.get(UNEMBED)
            segments.append(HeadRows(factors, start, start + len(padded), place.share.loss.temperature))
            adapters.append((place.adapter, start, start + len(padded)))
            indices.append(padded + place.start)
            targets.append(place.packed.targets_RK[padded])
            start += len(padded)
        decoder, hidden_RD = ending.decoder, ending.hidden(torch.cat(indices), AdapterRows(tuple(adapters)))
        logprobs = pooled_logprobs(hidden_RD, decoder.head_weight, segments, torch.cat(targets), decoder.config.logit_softcap)
        for number, segment in zip(numbers, segments, strict=True):
            found[number] = logprobs[segment.start : segment.start + len(chosen[number])]
    return found
