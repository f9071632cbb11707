"""Objects named by what they contain: nobody can put anything else under such a name without being noticed."""

from typing import Annotated, Final

import msgspec
from blake3 import blake3

from bloomery.obs.failpoints import failpoint
from bloomery.types.errors import Unavailable
from bloomery.types.objects import Objects
from bloomery.types.wire import Wire

FOLDER: Final = "obj"
MAX_BYTES: Final = 1 << 44

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""blake3, all of it."""


class Ref(Wire, frozen=True):
    """An object that there is."""

    blake3: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]

    @property
    def key(self) -> str:
        """Where it lies."""
        return f"{FOLDER}/{self.blake3}"


def keep(objects: Objects, data: bytes | memoryview) -> Ref:
    """Store `data`, and see that it is there whole.

    It is written though it may be there: an object that was left over is young again then, and nobody sweeps it before a manifest names it.
    """
    ref = Ref(blake3=blake3(data).hexdigest(), size=len(data))
    failpoint("chain.object.started")
    objects.put(ref.key, data)
    failpoint("chain.object.put")
    if (found := objects.head(ref.key)) is None or found.size != ref.size:
        raise Unavailable(
            f"{objects.name}: `{ref.key}` was put with {ref.size} bytes, and {found.size if found else 'nothing'} is there: put it again"
        )
    return ref
