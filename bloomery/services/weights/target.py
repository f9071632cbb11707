"""What a model name means at the moment it is asked for."""

from typing import NamedTuple

from bloomery.types.generation import Priority, Weights
from bloomery.types.resources import Price


class Target(NamedTuple):
    """Weights on a base, and the deployment through which they were reached, if any. It stays what it is when the deployment moves on."""

    weights: Weights
    base_hash: str
    deployment: str | None
    revision: int | None
    display: str
    """The name as the caller gave it."""
    deployment_id: str | None = None
    revision_id: str | None = None
    price: Price | None = None
    """What its tokens cost now, where that is known."""
    patient: bool = False
    """Whether whoever asks it for an answer waits for none."""

    @property
    def priority(self) -> Priority:
        """Of who asks it for an answer: deployments and base models serve people, a snapshot that nobody deployed is being judged."""
        served = self.deployment is not None or self.weights.key is None
        return "production" if served and not self.patient else "evaluation"
