"""A server's only engine dies in the middle of a stream: one that is bit-exact goes on with it, and one of `--plain` says that nobody can."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.live import running_server

TOKENS = 64
DIES_AT = 20
"""The step, whose token nobody hears of."""


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "exact"])
def test_a_stream_outlives_its_engine_or_ends_with_an_error_and_never_goes_on_with_other_numbers(plain: bool, tmp_path: Path) -> None:
    died = tmp_path / "died"
    env = {"BLOOMERY_FAILPOINTS": f"engine.decode.step@{DIES_AT}:{died}"}
    options = ["--plain"] if plain else []
    asked: dict[str, Any] = {"model": "bloomery-tiny", "prompt": "def main():", "seed": 1, "max_tokens": TOKENS, "logprobs": 1}
    asked["extra_body"] = {"ignore_eos": True}
    with (
        running_server(tmp_path / "data", *options, env=env) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=120) as sdk,
    ):
        before = server.pid("engine-bloomery-tiny")
        told: list[Any] = []
        if plain:
            with pytest.raises(openai.APIError, match=r"not bit-exact.*went away in the middle of this answer.*send the request again"):
                told.extend(sdk.completions.create(stream=True, **asked))
        else:
            told.extend(sdk.completions.create(stream=True, **asked))
        assert died.exists()
        text = "".join(chunk.choices[0].text for chunk in told)
        logprobs = [number for chunk in told if chunk.choices[0].logprobs for number in chunk.choices[0].logprobs.token_logprobs]
        again = sdk.completions.create(**asked).choices[0]
        assert server.pid("engine-bloomery-tiny") != before
    assert len(again.logprobs.token_logprobs) == TOKENS
    if plain:
        assert 0 < len(logprobs) < DIES_AT
    else:
        assert (text, logprobs) == (again.text, again.logprobs.token_logprobs)
