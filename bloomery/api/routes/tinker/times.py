"""Times as the contract writes them."""

from datetime import UTC, datetime


def shown_time(at_us: int) -> str:
    """A stored time in ISO 8601, UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat()
