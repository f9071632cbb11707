"""What a stream says when much is there at once, and a thousand of them on an api process of its own."""

import asyncio
import resource
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from bench.streams import many
from tests.openai.server import Script, ScriptedServer
from tests.openai.test_contract import chat, complete, tokens_of


def test_a_stream_that_breaks_off_has_said_every_token_that_it_is_charged_for(sdk: OpenAI, server: ScriptedServer) -> None:
    server.scripted.script = Script(together=True, abort_after=3)
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="gave this request up"):
        chunks.extend(complete(sdk, stream=True))
    assert tokens_of("".join(chunk.choices[0].text for chunk in chunks)) == tokens_of("It is 36.")[:3]
    span = server.span(chunks[0].id)["span"]
    assert (span["status"], span["out_tokens"]) == ("error", 3)


def test_the_end_of_a_choice_does_not_wait_for_the_others(sdk: OpenAI, server: ScriptedServer) -> None:
    # What comes behind the stop string is there already, and is not told.
    server.scripted.script = Script(("one two three four",), together=True, mute=(1,))
    with chat(sdk, stream=True, n=2, stop=["two"], timeout=60) as stream:
        ended = next(chunk.choices[0] for chunk in stream if chunk.choices[0].finish_reason)
    assert (ended.index, ended.finish_reason) == (0, "stop")


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """A thousand connections are more than a process may have by itself on many machines, beside what it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.usefixtures("many_open_files")
def test_a_thousand_streams_are_served_together_without_an_error() -> None:
    figures = asyncio.run(many(streams=1000, tokens=8, step_s=0.1))
    assert figures["errors"] == 0
