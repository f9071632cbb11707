"""What deployments serve and served, and versions of weights as files."""

from typing import Any, Literal

from pydantic import Field

from bloomery.types.resources import Fidelity, Name, Price, Resource


class VersionFile(Resource):
    """One file of an exported version."""

    name: Name
    size_bytes: int


class VersionFiles(Resource):
    """A version as files: `form` adapter (for `peft`) or merged (for `transformers`); `kind` says what was trained."""

    version: str
    kind: Literal["lora", "full"]
    form: Literal["adapter", "merged"]
    base_model: str
    base_hash: str
    files: list[VersionFile]


class CreateDeployment(Resource):
    """Serve a version (a snapshot's, or a base model by alias) under a name."""

    name: Name
    version: str
    evidence: dict[str, Any] = Field(default={})


class Promote(Resource):
    """Make a version the live one; `evidence` says why (an evaluation, a test)."""

    version: str
    evidence: dict[str, Any] = Field(default={})


class SetPrice(Resource):
    """What the tokens of a deployment cost from now on; null: that is not known."""

    price: Price | None


class Rollback(Resource):
    """Make an earlier revision live again."""

    revision: int = Field(ge=1, lt=1 << 63)


class Revision(Resource):
    """What a deployment serves or served."""

    number: int
    version: str
    state: str
    evidence: dict[str, Any]
    created_us: int
    updated_us: int


SwapKind = Literal["created", "promoted", "rolled_back"]


class Swap(Resource):
    """Another revision of a deployment became live."""

    kind: SwapKind
    from_revision: int | None
    """Which was live before; None where the deployment began."""
    to_revision: int
    staging_s: float
    """How long the swap waited, before, for those who serve to have the weights in memory, proved; who was away then has them when it is back."""
    by: str
    """The name of the key that asked for it."""
    at_us: int


class ProvedOn(Resource):
    """A process that has weights in memory, and read them back: they are those of the version's manifest (`docs/rl.md`)."""

    process: str
    """`engine`, or the name of a replica."""
    root: str
    """State hash of all tensors."""


class Deployment(Resource):
    """A served name with its numbered revisions, of which one is live."""

    id: str
    name: str
    base_model: str
    base_hash: str
    live: Revision
    revisions: list[Revision]
    fidelity: Fidelity | None = None
    """The card of the live version; None until it was measured."""
    proved: list[ProvedOn] = Field(default=[])
    """Who has the live version in memory now."""
    price: Price | None = None
    """What its tokens cost; None: nobody said."""
    created_us: int
    updated_us: int
