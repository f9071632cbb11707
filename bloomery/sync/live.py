"""The numbers that a process computes with, read back from where they lie, under the indices that they have in a manifest.

A decoder's tensors are cut out of ours (`names.stored_places`), and matrices that lie in the order of a library are put back into the plain one,
which moves bits and changes none. Factors of an adapter are cut out of the fused ones, where those on the output side are multiplied by the
adapter's scale; what lies around them there must be zero, because it is multiplied with too. Everything is read in pieces, so that a part of it can
be read again at any time. Hashes are of the values that are computed with: `scaled` says what becomes of published ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter, ScaledView
from bloomery.models.names import Place, stored_places
from bloomery.models.pieces import joined, runs
from bloomery.models.products import is_packed, unpacked
from bloomery.models.published_names import published_name
from bloomery.models.rests import rest
from bloomery.models.tensor_bytes import num_set, raw_bits
from bloomery.sync.state_hash import MASK, SEEDS, UNSIGNED, Bits, StateHash, change, hash_elements, hash_parts
from bloomery.types.errors import Corrupt

PIECE_ELEMENTS: Final = 1 << 20
PACKED_EMBEDDING: Final = "lm_head.weight"
"""What the pieces of a tied head are called that lies packed beside the embedding."""


class Part(NamedTuple):
    """Neighbouring elements of one published tensor, where they lie in what is read."""

    name: str
    first: int
    """Index of the first among all elements."""
    numel: int
    take: Callable[[Tensor], Tensor] | None
    """In the order of the published tensor. None: what is read are the parts, one after the other, and their elements are neighbours."""


class Piece(NamedTuple):
    """What is read at a time: some rows of a published tensor, some small tensors, or a packed matrix with all that lies in it."""

    read: Callable[[], Tensor]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.numel for part in self.parts)


def pieces(decoder: Decoder, adapter: FusedAdapter | None) -> list[Piece]:
    """Of an adapter, or of all of a decoder, be it packed or not."""
    return list(_of_decoder(decoder) if adapter is None else _of_adapter(adapter))


class Published(Mapping[str, Tensor]):
    """The tensors of a decoder, be it packed or not, under their published names; each is made when it is asked for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._places = decoder, dict(stored_places(decoder.config))

    def __getitem__(self, name: str) -> Tensor:
        return _stored(self._decoder, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def hash_piece(piece: Piece) -> dict[str, StateHash]:
    """Of what is in memory now, by the names of its parts."""
    return _hash_read(piece.read(), piece.parts)


def _hash_read(tensor: Tensor, parts: Sequence[Part]) -> dict[str, StateHash]:
    if any(part.take is None for part in parts):
        return dict(zip((part.name for part in parts), hash_neighbours(tensor, [part.numel for part in parts], parts[0].first), strict=True))
    return {part.name: hash_tensor(part.take(tensor), part.first) for part in parts if part.take is not None}


def hash_pieces(pieces: Iterable[Piece]) -> list[dict[str, StateHash]]:
    """One after the other, with rests between them."""
    found = []
    for piece in pieces:
        rest()
        found.append(hash_piece(piece))
    return found


def hash_factors(pieces: Iterable[Piece]) -> tuple[list[dict[str, StateHash]], int]:
    """The same of an adapter, and how many of its numbers are set, for `refuse_stray`."""
    found, num_own = [], 0
    for piece in pieces:
        rest()
        tensor = piece.read()
        found.append(_hash_read(tensor, piece.parts))
        own = [part.take(tensor) for part in piece.parts if part.take is not None]
        num_own += sum(map(num_set, own or [tensor]))
    return found, num_own


def tensor_states(hashed: Iterable[Mapping[str, StateHash]]) -> dict[str, StateHash]:
    """Of whole tensors, from the hashes of all pieces."""
    found: dict[str, StateHash] = {}
    for parts in hashed:
        for name, state in parts.items():
            found[name] = found.get(name, StateHash()) + state
    return found


def hash_tensor(tensor: Tensor, first: int) -> StateHash:
    """Of a tensor's elements, whose first has index `first`; on whatever device it is, in one pass."""
    if tensor.device.type == "cpu":
        return hash_elements(_unsigned(tensor), first)
    return hash_on_device(raw_bits(tensor.reshape(-1)), first)


def hash_tensors(tensors: Sequence[Tensor], first: int) -> list[StateHash]:
    """Of each of some tensors of one dtype whose elements are neighbours in this order, in as few passes as pieces allow."""
    found: list[StateHash] = []
    for run in runs([tensor.numel() for tensor in tensors], PIECE_ELEMENTS):
        rest()
        numels = [tensors[index].numel() for index in run]
        found += hash_neighbours(joined([tensors[index] for index in run]), numels, first)
        first += sum(numels)
    return found


def hash_neighbours(elements: Tensor, numels: Sequence[int], first: int) -> list[StateHash]:
    """Of each of the parts of so many elements that neighbouring elements [n] consist of, the first of which has index `first`."""
    if elements.device.type == "cpu":
        return hash_parts(_unsigned(elements), list(accumulate(numels)), first)
    firsts = accumulate(numels, initial=first)
    return [hash_tensor(part, start) for part, start in zip(elements.split(list(numels)), firsts, strict=False)]


def changed(indices: Tensor, old: Tensor, new: Tensor) -> StateHash:
    """What to add to a hash when elements [n] at these indices among all, each named once, become others."""
    return change(indices.cpu().numpy(), _unsigned(old), _unsigned(new))


def hash_on_device(bits: Tensor, first: int) -> StateHash:
    """The same in torch's own whole numbers, which wrap around as the sums do; `bits` [n] is of a signed type, or uint8."""
    unsigned = (1 << 8 * bits.element_size()) - 1
    sums = [0, 0]
    for start in range(0, len(bits), PIECE_ELEMENTS):
        values = bits[start : start + PIECE_ELEMENTS].long()
        if bits.element_size() < 8:
            values = values & unsigned
        places = torch.arange(start, start + len(values), device=bits.device)
        for lane, seed in enumerate(SEEDS):
            sums[lane] += int((_keys(places, seed + first) * values).sum())
    return StateHash(sums[0] & MASK, sums[1] & MASK)


def scaled(values: Tensor, scale: float) -> Tensor:
    """What is computed with where `values` were published: the very operation of those who fill an adapter."""
    return values if scale == 1 else values * scale


def refuse_stray(adapter: FusedAdapter, num_own: int | None = None) -> None:
    """Corrupt where a fused tensor holds anything beside its factors, of which `num_own` numbers are set where somebody has counted."""
    if found := adapter.num_stray(num_own):
        raise Corrupt(f"{found} numbers around an adapter's factors in memory are not zero, and would be multiplied with: load it again")


def adapter_views(adapter: FusedAdapter) -> dict[str, ScaledView]:
    """Every factor under its published name, in canonical order."""
    named = {published_name(name, stacked=view.values.dim() == 3): view for name, view in adapter.factors().items()}
    return dict(sorted(named.items()))


def tensor_firsts(decoder: Decoder, adapter: FusedAdapter | None) -> dict[str, int]:
    """Index of the first element of each published tensor, of an adapter or of all of a decoder."""
    if adapter is None:
        return first_indices({name: math.prod(place.shape) for name, place in stored_places(decoder.config)})
    return first_indices({name: view.values.numel() for name, view in adapter_views(adapter).items()})


def first_indices(numels: Mapping[str, int]) -> dict[str, int]:
    """Index of the first element of each tensor, by their published names."""
    found, first = {}, 0
    for name in sorted(numels):
        found[name], first = first, first + numels[name]
    return found


def has_packed_embedding(decoder: Decoder) -> bool:
    """Whether a decoder whose head is its embedding multiplies with a packed copy of that."""
    return decoder.config.tied_head and decoder.head is not None


def embedding_name(decoder: Decoder) -> str:
    """What its directory calls the embedding."""
    return next(name for name, place in stored_places(decoder.config) if place.parameter == "embedding")


def _of_adapter(adapter: FusedAdapter) -> Iterator[Piece]:
    named = [(name, view.values) for name, view in adapter_views(adapter).items()]
    firsts = [0, *accumulate(values.numel() for _, values in named)]
    for run in runs([values.numel() for _, values in named], PIECE_ELEMENTS):
        if len(run) == 1:
            (name, values), first = named[run[0]], firsts[run[0]]
            yield from _rows_of(name, first, tuple(values.shape), lambda values=values: values)  # type: ignore[misc]
        else:
            parts = tuple(Part(named[index][0], firsts[index], named[index][1].numel(), None) for index in run)
            yield Piece(partial(joined, [named[index][1] for index in run]), parts)


def _of_decoder(decoder: Decoder) -> Iterator[Piece]:
    places = dict(stored_places(decoder.config))
    firsts = first_indices({name: math.prod(place.shape) for name, place in places.items()})
    packed: dict[tuple[str, int | None], list[Part]] = {}
    for name, place in places.items():
        if _lies_packed(_parameter(decoder, place)):
            part = Part(name, firsts[name], math.prod(place.shape), partial(_cut, place))
            packed.setdefault((place.parameter, place.expert), []).append(part)
        else:
            yield from _rows_of(name, firsts[name], place.shape, partial(_stored, decoder, place))
    # What lies in one packed matrix is read together: a part of it takes as long as all.
    for (parameter, expert), parts in packed.items():
        yield Piece(partial(_unpacked, decoder, Place(parameter, (), expert=expert)), tuple(parts))
    if has_packed_embedding(decoder):
        # It multiplies with the embedding's numbers: the same indices, so the same hash.
        name = embedding_name(decoder)
        yield Piece(lambda: unpacked(decoder.head_weight), (Part(PACKED_EMBEDDING, firsts[name], math.prod(places[name].shape), _same),))


def _rows_of(name: str, first: int, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Iterator[Piece]:
    """A tensor that can be read in part, some rows at a time."""
    row = math.prod(shape[1:])
    step = max(1, PIECE_ELEMENTS // max(1, row))
    for start in range(0, shape[0], step):
        stop = min(shape[0], start + step)
        yield Piece(read, (Part(name, first + start * row, (stop - start) * row, partial(_between, start, stop)),))


def _between(start: int, stop: int, tensor: Tensor) -> Tensor:
    return tensor[start:stop]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _stored(decoder: Decoder, place: Place) -> Tensor:
    return _cut(place, _unpacked(decoder, place))


def _cut(place: Place, tensor: Tensor) -> Tensor:
    """A published tensor out of ours."""
    return tensor[place.rows].reshape(place.shape)


def _unpacked(decoder: Decoder, place: Place) -> Tensor:
    """Ours that a published tensor lies in, of one expert where there are experts; in plain order."""
    found = _parameter(decoder, place)
    if isinstance(found, nn.ParameterList) and place.expert is None:
        return torch.stack([unpacked(matrix) for matrix in found])
    return unpacked(found if place.expert is None else found[place.expert])  # type: ignore[arg-type]


def _parameter(decoder: Decoder, place: Place) -> Tensor | nn.ParameterList:
    """Ours; it is looked for anew each time, for it may be packed meanwhile."""
    path, _, leaf = place.parameter.rpartition(".")
    found: Tensor | nn.ParameterList = getattr(decoder.get_submodule(path), leaf)
    return found


def _lies_packed(parameter: Tensor | nn.ParameterList) -> bool:
    return isinstance(parameter, nn.ParameterList) or is_packed(parameter)


def _unsigned(tensor: Tensor) -> Bits:
    """Raw bits [n] of the elements; of a tensor in one piece on the CPU nothing is copied."""
    found: Bits = raw_bits(tensor.cpu().reshape(-1)).numpy()
    return found.view(UNSIGNED[tensor.element_size()])


def _keys(places: Tensor, start: int) -> Tensor:
    """`splitmix64(start + places) | 1` as signed numbers of the same bits."""
    x = places + _signed(start + 0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left, which torch has for unsigned numbers alone."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number
