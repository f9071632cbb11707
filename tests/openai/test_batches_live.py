"""Batches on a real server, over the unmodified `openai` SDK: beside people who ask, and through deaths of the api."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.live import LiveServer, free_port, running_server, wait_until
from tests.openai.test_batches import ended, lines, told

LINES = 300
DEATHS = 3


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[LiveServer]:
    """A server of its own, whose port stays when its api is started again."""
    with running_server(tmp_path / "data", "--port", str(free_port())) as server:
        yield server


def asked(number: int) -> dict[str, Any]:
    """Line 7 of ten cannot be answered."""
    messages = [{"role": "user", "content": f"Count to {number}."}]
    body = {"model": "bloomery-tiny", "messages": messages, "seed": number, "max_tokens": 12 if number % 10 != 7 else 10**6}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def begun(sdk: OpenAI, count: int = LINES) -> str:
    file = sdk.files.create(file=("requests.jsonl", lines(*map(asked, range(count)))), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def answered(sdk: OpenAI, batch: str) -> int:
    """So far; -1 while nobody is there to say it."""
    with suppress(openai.APIConnectionError, openai.InternalServerError):
        counts = sdk.batches.retrieve(batch).request_counts
        return 0 if counts is None else counts.completed + counts.failed
    return -1


@pytest.mark.slow
def test_a_batch_goes_on_through_deaths_of_the_api_and_every_line_has_one_answer(mortal: LiveServer) -> None:
    with OpenAI(base_url=f"{mortal.url}/v1", api_key=mortal.key, max_retries=0) as sdk:
        batch = begun(sdk)
        for death in range(1, DEATHS + 1):
            wait_until(lambda death=death: answered(sdk, batch) >= death * LINES // (DEATHS + 2))
            before = answered(sdk, batch)
            os.kill(mortal.pid("api"), signal.SIGKILL)
            wait_until(lambda: answered(sdk, batch) >= 0)
            assert answered(sdk, batch) >= before
            assert sdk.batches.retrieve(batch).status == "in_progress"
        wait_until(lambda: answered(sdk, batch) == LINES, 300)
        disturbed, undisturbed = ended(sdk, batch), ended(sdk, begun(sdk))
        assert disturbed.status == undisturbed.status == "completed"
        assert disturbed.request_counts == undisturbed.request_counts
        texts = [[said(each) for each in told(sdk, done.output_file_id)] for done in (disturbed, undisturbed)]
        assert texts[0] == texts[1]
        assert [name for name, _ in texts[0]] == [str(number) for number in range(LINES) if number % 10 != 7]
        errors = told(sdk, disturbed.error_file_id)
        assert [each["custom_id"] for each in errors] == [str(number) for number in range(LINES) if number % 10 == 7]
        assert {each["response"]["body"]["error"]["param"] for each in errors} == {"max_tokens"}
        number, text = texts[0][0]
        alone = sdk.chat.completions.create(**asked(int(number))["body"])
        assert alone.choices[0].message.content == text


@pytest.mark.slow
def test_lines_that_are_written_and_in_no_row_when_the_api_dies_are_asked_again(tmp_path: Path) -> None:
    count, died = 60, tmp_path / "died"
    dies = {"BLOOMERY_FAILPOINTS": f"batch.lines.written@2:{died}"}
    with (
        running_server(tmp_path / "data", "--port", str(free_port()), env=dies) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sdk,
    ):
        batch = begun(sdk, count)
        wait_until(died.exists)
        wait_until(lambda: answered(sdk, batch) == count)
        done = ended(sdk, batch)
        assert done.status == "completed"
        every = [each["custom_id"] for file in (done.output_file_id, done.error_file_id) for each in told(sdk, file)]
        assert sorted(every, key=int) == [str(number) for number in range(count)]


def said(line: dict[str, Any]) -> tuple[str, str]:
    return line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"]
