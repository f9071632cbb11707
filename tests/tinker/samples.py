"""Samples through the unmodified SDK over the fake engine."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from bloomery.api.routes.tinker.futures import MAX_RUNNING
from bloomery.config import RecordMode
from bloomery.services.principal import SCOPES, Principal
from tests.render.builders import byte_level
from tests.tinker.live import KEY, MODEL, Served, served

ME = Principal("default", "test", SCOPES)
ENDLESS = (0, 1)
"""The fake keeps the last token of an answer to such a prompt to itself."""
FIRST_SAMPLED = 100


@contextmanager
def serving(directory: Path, *, record: RecordMode = "full", most_samples: int = MAX_RUNNING) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, served(directory, record=record, most_samples=most_samples) as running:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running
        gc.collect()


@contextmanager
def connected(server: Served, **headers: str) -> Iterator[tinker.ServiceClient]:
    """A client that sends these headers with whatever it sends."""
    with tinker.ServiceClient(base_url=server.url, api_key=KEY, default_headers_overrides=headers) as client:
        yield client


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
