"""What tests of recipes share: a client of the live server, its model's tokenizer, and one whose template teaches calls of tools."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomery.client import Client
from bloomery.render import ChatTokenizer
from tests.live import LiveServer
from tests.openai.tool_model import TEMPLATE

SHIPPED = Path(__file__).parents[2] / "bloomery" / "models" / "tiny" / "weights"


@pytest.fixture
def client(live_server: LiveServer) -> Iterator[Client]:
    """With all rights."""
    with Client(live_server.url, live_server.key) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(live_server: LiveServer) -> ChatTokenizer:
    """That of the model that ships, whose own template knows no tools."""
    with Client(live_server.url, live_server.key) as client:
        return ChatTokenizer.load(Path(client.models()[0].path))


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
