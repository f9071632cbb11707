"""One delta of a foreign format: read, written, described, and applied to weights, all of them or none.

Nothing in such a file says of which weights it is, but for the names of tensors and, in arc_v3, their shapes; what holds it against them is an
Adler-32 of every tensor as it is afterwards. So all tensors are decoded and checked before the first is written. What they change is kept meanwhile
while it has room in `STAGED_BYTES`, and decoded again otherwise; beside that, memory is needed for the largest tensor, a few times.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from bloomery.sync.codec.layout import Layout, Tensor, Weights
from bloomery.sync.foreign import arc2, arc3, archive, one_piece
from bloomery.sync.foreign.changed import Bits, Changed, checksum_of, read_checksum, verify
from bloomery.types.errors import Corrupt, InvalidInput, shown
from bloomery.types.tensor_file import TensorSpec

Format = Literal["arc_v2", "arc_v3"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
STAGED_BYTES: Final = 1 << 30


class Payload(NamedTuple):
    """What a delta has of one tensor: its bytes, and the Adler-32 of the tensor once it is changed."""

    data: memoryview
    checksum: int


class Applied(NamedTuple):
    """What a delta did."""

    tensors: int
    """That changed."""
    elements: int
    """That changed."""


class Described(NamedTuple):
    """One tensor of a delta, as far as it says so itself."""

    name: str
    encoding: str
    size_bytes: int
    """Of the payload."""
    elements: int | None
    changed: int | None
    """Elements; arc_v2 says of neither, because it knows bytes alone."""


class ForeignDelta:
    """A delta whose file is taken apart; its payloads are read when they are applied."""

    def __init__(self, format: Format, payloads: Mapping[str, Payload]) -> None:
        self.format, self.payloads = format, payloads

    @classmethod
    def parse(cls, data: bytes | memoryview) -> "ForeignDelta":
        """A delta by its content; Corrupt for a file of anything else."""
        found = archive.read(memoryview(data))
        if not found.payloads or found.payloads.keys() != found.metadata.keys():
            raise Corrupt("a delta has a tensor or more and the Adler-32 of each, and this file has others")
        formats = {_format(name, payload) for name, payload in found.payloads.items()}
        if len(formats) != 1:
            raise Corrupt(f"a delta is of one format, and this is one of {' and '.join(sorted(formats))}")
        return cls(formats.pop(), {name: Payload(each, read_checksum(found.metadata[name])) for name, each in found.payloads.items()})

    def check_names(self, layout: Layout) -> None:
        """Corrupt, unless it is of every tensor of these weights, and of no other."""
        if odd := self.payloads.keys() ^ {tensor.name for tensor in layout.tensors}:
            raise Corrupt(f"the delta is of other weights: `{shown(min(odd))}` is a tensor of one of them alone")

    def changes(self, tensor: Tensor, old: Bits) -> Changed:
        """What becomes of one tensor with elements `old` [n]; Corrupt where that is not what its Adler-32 says."""
        data, checksum = self.payloads[tensor.name]
        try:
            changed = arc2.decode(data, old) if self.format == "arc_v2" else arc3.decode(data, old, TensorSpec(tensor.dtype, tensor.shape), checksum)
            verify(changed, old, checksum)
        except Corrupt as error:
            replayed = f" (they have the Adler-32 {checksum} already, as if it had been applied before)" if checksum_of(old) == checksum else ""
            raise Corrupt(f"tensor `{shown(tensor.name)}`: {error}{replayed}") from error
        return changed

    def describe(self) -> list[Described]:
        """Its tensors in the order of their names."""
        return [_described(name, self.format, payload.data) for name, payload in self.payloads.items()]


def looks_so(start: bytes | memoryview) -> bool:
    """Whether a file that begins with these bytes may be a foreign delta: our own begin otherwise."""
    return archive.looks_so(start)


def encode(old: Weights, new: Weights, format: Format) -> bytes:
    """The file that makes `new` of `old`; InvalidInput, when they are no weights of one layout."""
    if (difference := new.layout.difference(old.layout)) is not None:
        raise InvalidInput(f"a delta is between weights of one layout: of the new ones {difference}")
    payloads, checksums = {}, {}
    for tensor in old.layout.tensors:
        before, after = one_piece.read(old, tensor), one_piece.read(new, tensor)
        spec = TensorSpec(tensor.dtype, tensor.shape)
        payloads[tensor.name] = arc2.encode(before, after) if format == "arc_v2" else arc3.encode(before, after, spec)
        checksums[tensor.name] = str(checksum_of(after))
    return archive.write(payloads, checksums)


def apply(delta: ForeignDelta, weights: Weights) -> Applied:
    """Change the weights; Corrupt, when anything of the delta is not as it should be, and then they are as they were."""
    delta.check_names(weights.layout)
    tensors = weights.layout.tensors
    staged: dict[str, Changed] = {}
    staged_bytes = 0
    for tensor in tensors:
        changed = delta.changes(tensor, one_piece.read(weights, tensor))
        staged_bytes += changed.positions.nbytes + changed.values.nbytes
        if staged_bytes <= STAGED_BYTES:
            staged[tensor.name] = changed
    counts = []
    for tensor in tensors:
        changed = staged.pop(tensor.name) if tensor.name in staged else delta.changes(tensor, one_piece.read(weights, tensor))
        one_piece.write(weights, tensor, changed)
        counts.append(len(changed.positions))
    return Applied(sum(map(bool, counts)), sum(counts))


def _format(name: str, payload: memoryview) -> Format:
    if arc2.looks_so(payload):
        return "arc_v2"
    if arc3.looks_so(payload):
        return "arc_v3"
    raise Corrupt(f"tensor `{shown(name)}` has neither an arc_v2 nor an arc_v3 payload")


def _described(name: str, format: Format, payload: memoryview) -> Described:
    if format == "arc_v2":
        return Described(name, "xor zstd", len(payload), None, None)
    try:
        return Described(name, *arc3.describe(payload))
    except Corrupt as error:
        raise Corrupt(f"tensor `{shown(name)}`: {error}") from error
