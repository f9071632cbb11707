"""What is read of a run's chain is held against the manifests of its versions: each refusal says of which object, and of which version."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain.manifest import Manifest, key
from bloomery.sync.chain.objects import keep
from bloomery.sync.codec.delta import encode
from bloomery.sync.run_chain import RunChain
from bloomery.types.errors import Corrupt
from tests.sync.chain.models import RUN, same, stepped, version
from tests.sync.chain.test_lies import turned
from tests.sync.chain.test_receiver import publish, root
from tests.sync.codec.hostile import Opened


def leading_elsewhere() -> bytes:
    """From the first version to the second by its head, and of one chunk to another second one."""
    lies, other = (Opened(encode(version(0), new)) for new in (version(1), stepped(version(0), 99)))
    for field in ("codec", "changed", "length"):
        lies.records[0][field] = other.records[0][field]
    lies.payloads[0] = other.payloads[0]
    return lies.sealed()


def leading_nowhere() -> bytes:
    """The same, and the payload is none of its codec."""
    opened = Opened(encode(version(0), version(1), "fast"))
    opened.payloads[0][:] = b"\xff" * len(opened.payloads[0])
    return opened.sealed()


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a base": (lambda: encode(None, version(1)), "the delta `obj/.*` of version 1 is a base, and its manifest says `delta`"),
    "from elsewhere": (lambda: encode(version(2), version(1)), "of version 1 starts from state .*, and version 0 is"),
    "to elsewhere": (lambda: encode(version(0), version(2)), "of version 1 leads to state .*, and the version is"),
    "another model": (lambda: encode(turned(version(0)), turned(version(1))), r"of version 1 is of another model: `a` is BF16 \[50, 40\]"),
    "a payload to elsewhere": (leading_elsewhere, "what the chain of run run-1 says of the version in state .* comes to state"),
    "a payload to nowhere": (leading_nowhere, "the delta `obj/.*` of version 1 was put on weights that are not version 0: "),
}


@pytest.mark.parametrize("what", LIES)
def test_a_version_to_which_another_object_leads_is_not_read(what: str, tmp_path: Path) -> None:
    made, reason = LIES[what]
    chain = Folder(tmp_path)
    publish(chain, 1)
    assert same(RunChain(chain, RUN, trusted=()).read(root(version(1))), version(1))
    manifest = Manifest.from_json(chain.get(key(1), at_most=10**6)[0], "here")
    step = msgspec.structs.replace(manifest.steps[0], object=keep(chain, made()))
    chain.put(key(1), msgspec.structs.replace(manifest, steps=(step,)).to_json())
    with pytest.raises(Corrupt, match=reason):
        RunChain(chain, RUN, trusted=()).read(root(version(1)))
    assert same(RunChain(chain, RUN, trusted=()).read(root(version(0))), version(0))
