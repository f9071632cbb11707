"""What a version of a chain is: one canonical JSON document under its number, and its existence is the commit.

`v/<number>` is created and never written again. It names objects by their hashes, the version before it by number and hash, and the weights by their
state hashes; so whoever trusts one manifest, by its signature or by the hash that another one has of it, trusts all that it names.
"""

import json
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3

from bloomery.sync.chain.keys import Signer
from bloomery.sync.chain.objects import Digest, Ref
from bloomery.types.errors import Corrupt
from bloomery.types.ids import NAME
from bloomery.types.wire import Wire

FOLDER: Final = "v"
MAX_BYTES: Final = 1 << 16
LEVELS: Final = (4, 16, 64)
"""How many steps merged deltas span."""
_DIGITS: Final = 12
_SIGNED: Final = b"bloomery chain manifest 1\n"
"""Before the bytes that are signed: a signature says nothing about anything else."""

Sequence = Annotated[int, msgspec.Meta(ge=0, lt=10**_DIGITS)]
State = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Step(Wire, frozen=True):
    """An object that turns the weights of version `start` into those of the manifest's version; a base turns anything into them."""

    kind: Literal["delta", "merged", "base"]
    start: Sequence | None
    """None for a base."""
    object: Ref
    parts: Ref | None = None
    """Of a base: the hashes of its parts (`repair`), so that one of them can be fetched alone."""


class Manifest(Wire, frozen=True, kw_only=True):
    """One version of a chain."""

    format: Literal[1] = 1
    run: Annotated[str, msgspec.Meta(pattern=NAME, max_length=128)]
    epoch: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    """Of the lease that its writer held; it never falls along a chain."""
    sequence: Sequence
    parent: Digest | None
    """Hash of the manifest before it; None for the first one."""
    base: Sequence
    """The newest version with a base, this one included."""
    old_root: State | None
    """State hash of the version before it, from which the delta starts; None where the chain starts anew from a base."""
    new_root: State
    layout: State
    """Hash of the layout."""
    steps: Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=len(LEVELS) + 2)]
    signed_by: Annotated[str, msgspec.Meta(max_length=128)] = ""
    signature: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{0,256}$")] = ""

    @property
    def key(self) -> str:
        """Where it lies."""
        return key(self.sequence)

    def to_json(self) -> bytes:
        """The canonical bytes."""
        fields = msgspec.to_builtins(self)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    @property
    def hash(self) -> str:
        """Of the bytes, signature included."""
        return blake3(self.to_json()).hexdigest()

    @property
    def to_sign(self) -> bytes:
        """What a signature is of."""
        return _SIGNED + msgspec.structs.replace(self, signature="").to_json()

    def signed(self, signer: Signer) -> "Manifest":
        """The same, signed."""
        named = msgspec.structs.replace(self, signed_by=signer.name)
        return msgspec.structs.replace(named, signature=signer.sign(named.to_sign))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Manifest":
        """Read what lies at `where`; anything but the canonical bytes of a manifest that agrees with itself is refused."""
        try:
            found = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"{where} is no manifest of a chain: {error}") from error
        if found.to_json() != data:
            raise Corrupt(f"{where} is not in canonical form, so its hash would not identify it")
        found._check(where)
        return found

    def _check(self, where: str) -> None:
        kinds = [step.kind for step in self.steps]
        based = "base" in kinds
        for step in self.steps:
            if (step.kind == "base") != (step.start is None) or (step.parts is not None and step.kind != "base"):
                raise Corrupt(f"{where} has a {step.kind} that starts from {step.start}")
            span = 0 if step.start is None else self.sequence - step.start
            if (step.kind == "delta" and span != 1) or (step.kind == "merged" and span not in LEVELS):
                raise Corrupt(f"{where} has a {step.kind} of {span} steps: a delta is of one, and a merged one of {LEVELS}")
        if len({(step.kind, step.start) for step in self.steps}) != len(self.steps):
            raise Corrupt(f"{where} names a step twice")
        if (self.base == self.sequence) != based or self.base > self.sequence:
            raise Corrupt(f"{where} says that its newest base is that of version {self.base}, and has {'one' if based else 'none'} itself")
        if (self.parent is None) != (self.sequence == 0) or (self.old_root is not None and self.parent is None):
            raise Corrupt(f"{where} is version {self.sequence}, and {'has no' if self.parent is None else 'has a'} parent")
        if ("delta" in kinds) != (self.old_root is not None) or (self.old_root is None and kinds != ["base"]):
            raise Corrupt(f"{where} has {', '.join(kinds)}: a version is a delta from its parent, or starts anew from a base alone")


def key(sequence: int) -> str:
    """Where the manifest of a version lies; keys are in the order of their numbers."""
    return f"{FOLDER}/{sequence:0{_DIGITS}d}"


def sequence_of(manifest_key: str) -> int | None:
    """The number in a key, None for what is no key of a manifest."""
    digits = manifest_key.removeprefix(f"{FOLDER}/")
    return int(digits) if len(digits) == _DIGITS and digits.isascii() and digits.isdigit() else None
