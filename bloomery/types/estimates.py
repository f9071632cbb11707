"""What a job would take, told before it is made."""

from typing import Annotated

from pydantic import ConfigDict, Field

from bloomery.types.resources import Resource

Known = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Prices(Resource):
    """What whoever asks for an estimate knows: how fast training is here, what tokens cost, what the machine does."""

    # It travels as a query, where every value is a text.
    model_config = ConfigDict(strict=False)

    tokens_per_s: Known | None = None
    price_per_million: Known | None = None
    """Of tokens that go through the model."""
    price_per_hour: Known | None = None
    """Of the time that it takes."""

    def cost(self, tokens: int, seconds: float | None) -> float | None:
        """Of both together; None where there is no price, or where the time that has one is not known."""
        if (self.price_per_million, self.price_per_hour) == (None, None) or (self.price_per_hour is not None and seconds is None):
            return None
        return tokens * (self.price_per_million or 0.0) / 1e6 + (seconds or 0.0) * (self.price_per_hour or 0.0) / 3600


class JobEstimate(Resource):
    """What a job would take. `tokens` go through the model, of reinforcement at most; `seconds` at the pace that was given, or at the median one of
    `jobs` like it that ended here; `cost` at the prices that were given.

    `held_out` rows are compared at the end, at most, with what it began with; of 0 nothing says whether it became better.
    `too_long` rows have more tokens than there is room for, and `refused` ones cannot be rendered: each of them would fail the job.
    """

    rows: int
    held_out: int
    steps: int
    tokens: int
    seconds: float | None
    """None: no job like it has ended here yet, and no pace was given."""
    cost: float | None
    jobs: int
    too_long: int
    refused: int
