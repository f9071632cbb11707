from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.openai.server import Script, ScriptedServer
from tests.openai.tool_model import TEMPLATE


@pytest.fixture(scope="package")
def openai_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("openai")).listening() as server:
        yield server


@pytest.fixture(scope="package")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tmp_path_factory.mktemp("tools"))
    (Path(server.config.models[0].path) / "chat_template.jinja").write_text(TEMPLATE)
    with server.listening():
        yield server


@pytest.fixture
def server(openai_server: ScriptedServer) -> ScriptedServer:
    """Shared by all tests, with a fresh script."""
    openai_server.scripted.script = Script()
    openai_server.scripted.requests.clear()
    openai_server.scripted.aborted.clear()
    return openai_server


@pytest.fixture
def sdk(server: ScriptedServer) -> Iterator[OpenAI]:
    with server.sdk() as client:
        yield client
