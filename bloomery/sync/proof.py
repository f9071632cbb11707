"""That the weights in a memory are those of a version: `prove` before anybody is served with them, `Proof.scrub` a little at a time from then on.

`Expected` says what each tensor must hash to where it is computed with: a manifest's own state hashes, and for factors that are multiplied by a
scale those of the published values after the same multiplication, because rounding cannot be undone and an image can be compared. The published
values it takes them from were held against the manifest before (`manifest.verify`).
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from bloomery.models.decoder import Decoder
from bloomery.models.fused_adapter import FusedAdapter
from bloomery.models.pieces import runs
from bloomery.models.rests import rest
from bloomery.models.tensor_bytes import Packed
from bloomery.sync import live
from bloomery.sync.live import PIECE_ELEMENTS, Piece, hash_piece
from bloomery.sync.manifest import Manifest, TensorEntry
from bloomery.sync.state_hash import StateHash, total
from bloomery.types.errors import Corrupt

SCALED: Final = ".lora_B.weight"
"""How factors are called that are multiplied by the scale of their adapter where they are computed with."""


class Expected(NamedTuple):
    """Of one version."""

    version: str
    root: StateHash
    """Of the published values: the manifest's."""
    tensors: Mapping[str, StateHash]
    """By published name, of the values that are computed with."""


def expected(manifest: Manifest, entries: Sequence[TensorEntry], blob: bytes) -> Expected:
    """Of a published blob that was verified, and that has these `entries`. The scale is the manifest's, and not asked of an adapter."""
    states = {entry.name: StateHash.parse(entry.state) for entry in entries}
    root = total(states.values())
    if manifest.kind == "lora" and (scale := manifest.alpha / manifest.rank) != 1:
        states |= _scaled_states(entries, blob, scale)
    return Expected(manifest.version, root, states)


def _scaled_states(entries: Sequence[TensorEntry], blob: bytes, scale: float) -> dict[str, StateHash]:
    """Of the factors that are computed with after a multiplication. Their neighbours go through it for nothing: cutting them out takes longer."""
    found: dict[str, StateHash] = {}
    packed, numels, first = Packed(blob), [math.prod(entry.shape) for entry in entries], 0
    for run in runs(numels, PIECE_ELEMENTS):
        rest()
        names, own = [entries[index].name for index in run], numels[run.start : run.stop]
        states = live.hash_neighbours(live.scaled(packed.joined(names), scale), own, first)
        found |= {name: state for name, state in zip(names, states, strict=True) if name.endswith(SCALED)}
        first += sum(own)
    return found


class Proof:
    """Weights that were proved, and what every piece of them hashed to then."""

    def __init__(
        self, known: Expected, adapter: FusedAdapter | None, pieces: list[Piece], states: list[dict[str, StateHash]], seconds: float
    ) -> None:
        """`states`: of the `pieces`, which are all of a decoder where there is no adapter."""
        self.expected, self.seconds = known, seconds
        self._adapter = adapter
        self._pieces, self._states = pieces, states
        self._next = 0

    @property
    def root(self) -> str:
        """The manifest's root, which these weights were proved to have."""
        return str(self.expected.root)

    @property
    def numel(self) -> int:
        """Elements that are looked at in one round."""
        return sum(piece.numel for piece in self._pieces)

    @property
    def next_numel(self) -> int:
        """Elements of the piece that is looked at next, which is read as a whole."""
        return self._pieces[self._next].numel

    @property
    def round_done(self) -> bool:
        """Whether the next turn of scrubbing begins another round."""
        return self._next == 0

    def scrub(self, elements: int) -> int:
        """Hash the next pieces again, until so many elements are done or a round is; returns how many were. Corrupt names what has changed."""
        done = 0
        while done < elements and self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if done and done + piece.numel > elements:
                # A large one is looked at by itself: it may be too much for where the small ones are.
                break
            if (found := hash_piece(piece)) != self._states[self._next]:
                part = next(part for part in piece.parts if found[part.name] != self._states[self._next][part.name])
                raise Corrupt(
                    f"version {self.expected.version} is not in memory any more what it was proved to be: of elements {part.first} to "
                    f"{part.first + part.numel}, of tensor `{part.name}`, some have changed since"
                )
            done += piece.numel
            self._next += 1
        if self._next == len(self._pieces):
            if self._adapter is not None:
                live.refuse_stray(self._adapter)
            self._next = 0
        return done


def as_it_is(version: str, decoder: Decoder) -> Proof:
    """Of weights that nobody published: that they stay what they are now is all that it can show, at one pass over them."""
    began = time.perf_counter()
    pieces = live.pieces(decoder, None)
    states = live.hash_pieces(pieces)
    found = live.tensor_states(states)
    if live.has_packed_embedding(decoder):
        found.pop(live.PACKED_EMBEDDING)
    return Proof(Expected(version, total(found.values()), found), None, pieces, states, time.perf_counter() - began)


def prove(known: Expected, decoder: Decoder, adapter: FusedAdapter | None) -> Proof:
    """Read back every tensor that is computed with, in one pass; Corrupt where they are not those of the version."""
    began = time.perf_counter()
    pieces, num_own = live.pieces(decoder, adapter), 0
    if adapter is None:
        states = live.hash_pieces(pieces)
    else:
        states, num_own = live.hash_factors(pieces)
    wrong = _wrong(known, live.tensor_states(states), decoder)
    if wrong:
        raise Corrupt(
            f"the weights in memory are not those of version {known.version}: {len(wrong)} of {len(known.tensors)} tensors differ, "
            f"first `{wrong[0]}`; nothing is served with them"
        )
    if adapter is not None:
        rest()
        live.refuse_stray(adapter, num_own)
    return Proof(known, adapter, pieces, states, time.perf_counter() - began)


def _wrong(known: Expected, found: Mapping[str, StateHash], decoder: Decoder) -> list[str]:
    wanted = dict(known.tensors)
    if live.PACKED_EMBEDDING in found and live.has_packed_embedding(decoder):
        wanted[live.PACKED_EMBEDDING] = wanted[live.embedding_name(decoder)]
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
