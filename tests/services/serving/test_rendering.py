"""A slow template holds up its own requests and nobody else's."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bloomery.config import ModelConfig
from bloomery.services.engines.link import EngineLink
from bloomery.services.engines.models import Models
from bloomery.services.serving.rendering import AT_ONCE, THREADS, WAIT_S, Rendering
from bloomery.types.errors import InvalidInput, Unavailable
from tests.render.builders import CHATML, byte_level, small_config, write

USER = [{"role": "user", "content": "hello"}]
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def play(directory: Path, story: Callable[[Rendering], Awaitable[None]], wait_s: float = WAIT_S) -> None:
    async def run() -> None:
        configs = []
        for alias, template in (("quick", CHATML), ("slow", SLOW)):
            path = write(directory / alias, byte_level(), config=small_config(400), chat_template=template)
            configs.append(ModelConfig(alias=alias, path=str(path), base_hash=alias, dtype="float32", threads=1, socket=str(directory / alias)))
        links = {config.base_hash: EngineLink(config.base_hash, Path(config.socket), asyncio.Queue()) for config in configs}
        with Models(configs, links) as models:
            async with asyncio.timeout(60):
                await story(Rendering(models, wait_s))

    asyncio.run(run())


def test_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    async def story(rendering: Rendering) -> None:
        tokens = await rendering.prompt("quick", USER)
        assert byte_level().decode(tokens, skip_special_tokens=False) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert await rendering.encode("quick", ["The", "fox"], ["prompt", "prompt"]) == [byte_level().encode(text).ids for text in ("The", "fox")]
        with pytest.raises(ValueError, match="shorter"):
            await rendering.encode("quick", ["The", "fox"], ["prompt"])

    play(tmp_path, story)


def test_nothing_is_encoded_behind_a_text_that_does_not_fit(tmp_path: Path) -> None:
    async def story(rendering: Rendering) -> None:
        # The second cannot be encoded.
        with pytest.raises(InvalidInput, match=r"`input.0` has 4501 tokens and leaves no room in the model's context of 2048") as refused:
            await rendering.encode("quick", ["a b " * 1500, "\ud800"], ["input.0", "input.1"])
        assert refused.value.field == "input.0"

    play(tmp_path, story)


def test_a_slow_template_holds_up_its_own_requests_only(tmp_path: Path) -> None:
    async def story(rendering: Rendering) -> None:
        slow = [asyncio.create_task(rendering.prompt("slow", USER)) for _ in range(8 * THREADS)]
        await asyncio.sleep(0)
        await rendering.prompt("quick", USER)
        assert not any(task.done() for task in slow)
        for task in slow[1:]:
            task.cancel()
        with pytest.raises(InvalidInput, match="processor time"):
            await slow[0]
        await asyncio.wait(slow)

    play(tmp_path, story)


def test_who_waits_too_long_hears_for_what_and_no_template_is_blamed_for_texts(tmp_path: Path) -> None:
    async def story(rendering: Rendering) -> None:
        assert await rendering.encode("quick", ["The fox"], ["prompt"]) == [byte_level().encode("The fox").ids]
        fable = AT_ONCE // 4 * "The fox "
        encoding = [rendering.encode("quick", [fable], ["prompt"]) for _ in range(THREADS + 1)]
        *encoded, refused = await asyncio.gather(*encoding, return_exceptions=True)
        assert encoded == [[byte_level().encode(fable).ids]] * THREADS
        assert isinstance(refused, Unavailable)
        assert refused.message.startswith("waited 0 s for a turn to make tokens for base model quick, ")
        assert "template" not in refused.message

    play(tmp_path, story, wait_s=0.0)
