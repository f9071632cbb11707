"""What tests of agents share: a tokenizer whose template teaches calls of tools."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.render import ChatTokenizer
from tests.openai.tool_model import TEMPLATE

SHIPPED = Path(__file__).parents[2] / "bloomery" / "models" / "tiny" / "weights"


@pytest.fixture(scope="session")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatTokenizer]:
    """The vocabulary that ships, with another template."""
    path = tmp_path_factory.mktemp("tools")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(SHIPPED / name, path)
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = ChatTokenizer.load(path)
    yield tokenizer
    tokenizer.close()
