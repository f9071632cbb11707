"""Samples with drafts, as `/api/v1` takes them: the same class on the server and in the client."""

from typing import Annotated, Final

from pydantic import Field

from bloomery.types.checks import MAX_SAMPLES
from bloomery.types.resources import Resource

KEPT_HEADER: Final = "x-bloomery-kept"
"""How many tokens of each sample's draft were kept, beside the answer of one that had drafts."""

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]


class DraftedSample(Resource):
    """Continuations of a prompt, one for each draft, which may be empty; `stop` None means the model's own end tokens.

    `sampling_session_id` and `seq_id` are those of a sampler of the Training API, whose samples without drafts count on in the same numbers.
    """

    sampling_session_id: Annotated[str, Field(max_length=1 << 16)]
    seq_id: Annotated[int, Field(ge=0, lt=1 << 63)]
    prompt: list[Token]
    drafts: Annotated[list[list[Token]], Field(min_length=1, max_length=MAX_SAMPLES)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    seed: int
    temperature: float = 1.0
    top_k: Count = 0
    top_p: float = 1.0
    stop: list[Token] | None = None


class SampleBegun(Resource):
    """Where the answer is fetched: `POST /api/v1/retrieve_future`."""

    request_id: str
