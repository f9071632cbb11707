"""What is asked of recorded traffic beyond one inference: in which order, and what all of it comes to."""

from typing import Literal, TypedDict

from bloomery.types.resources import Resource

SpanKind = Literal["chat", "completion", "embedding", "sample"]
SpanStatus = Literal["ok", "error", "cancelled"]

SpanOrder = Literal["newest", "dearest", "slowest"]
"""`dearest` are those whose cost is known, `slowest` those that took any time that is known."""


class SpansWanted(TypedDict, total=False):
    """Which spans are meant: those to which all of it applies; what is None does not count."""

    deployment: str | None
    base_model: str | None
    """Asked by its own name or hash, and through no deployment."""
    episode: str | None
    status: SpanStatus | None
    version: str | None
    """Of the weights."""
    since_us: int | None
    until_us: int | None
    min_cost_usd: float | None


class TrafficTotals(Resource):
    """What so many recorded requests come to."""

    requests: int
    errors: int
    in_tokens: int
    cached_tokens: int
    """Of `in_tokens`: those that another request had computed before."""
    out_tokens: int
    seconds: float
    """From each request to its end, added up: requests that were answered together count each."""
    priced: int
    """Requests whose cost is known."""
    cost_usd: float | None
    """Of those; None where there is none."""


class DeploymentTotals(TrafficTotals):
    """The same of what was asked of one deployment; without a name, of everything else."""

    deployment: str | None


class TrafficReport(Resource):
    """What traffic comes to: all of it, and that of each deployment, the most requests first."""

    total: TrafficTotals
    deployments: list[DeploymentTotals]
