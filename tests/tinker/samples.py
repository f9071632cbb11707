"""Samples through the unmodified SDK over the fake engine."""

from collections.abc import Sequence
from typing import Any

import httpx
import tinker
from tinker import types

from bloomery.services.access.principal import SCOPES, Principal
from tests.render.builders import byte_level
from tests.tinker.over_fake_engine import KEY, MODEL, Served

ME = Principal("default", "test", SCOPES)
ENDLESS = (0, 1)
"""The fake keeps the last token of an answer to such a prompt to itself."""
FIRST_SAMPLED = 100


def sampler_of(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=MODEL).result()


def ask(sampler: tinker.SamplingClient, prompt: Sequence[int] = (1, 2), samples: int = 1, **params: Any) -> Any:
    given = types.SamplingParams(**{"max_tokens": 2, "seed": 7} | params)
    return sampler.sample(types.ModelInput.from_ints(list(prompt)), samples, given)


def letters(text: str) -> list[int]:
    """One token for each: those of whole words are beyond the vocabulary that the fake engine claims."""
    return [token for letter in text for token in byte_level().encode(letter, add_special_tokens=False).ids]


def get(server: Served, path: str) -> Any:
    answer = httpx.get(f"{server.url}/api/v1{path}", headers={"x-api-key": KEY})
    assert answer.status_code == 200, answer.text
    return answer.json()


def span_of(server: Served, answer: types.SampleResponse) -> dict[str, Any]:
    """What was recorded of an answer: the number of a sequence in it comes last in its id."""
    sequence_id = answer.sequences[0].sequence_id
    assert sequence_id is not None
    found: dict[str, Any] = get(server, f"/spans/{sequence_id.rpartition(':')[0]}")
    return found
