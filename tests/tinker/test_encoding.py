"""Compressed bodies: taken within bounds, told apart from what is none."""

import json

import httpx
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from bloomery.api.app import create_app
from bloomery.api.routes.tinker.encoding import decompress
from bloomery.types.errors import InvalidInput
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served

MIB = 1 << 20


@given(st.lists(st.binary(max_size=5000), min_size=1, max_size=3))
def test_frames_are_decompressed_one_after_the_other(parts: list[bytes]) -> None:
    compressed = b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)
    assert decompress(compressed) == b"".join(parts)


@pytest.mark.parametrize(
    "body", [b"not zstd", zstandard.ZstdCompressor().compress(b"x" * 9000)[:-1], zstandard.ZstdCompressor().compress(b"x") + b"!"]
)
def test_what_is_no_whole_frame_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="zstd") as refused:
        decompress(body)
    assert refused.value.field == "body"


def test_a_body_of_endless_empty_frames_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1024 zstd frames"):
        decompress(zstandard.ZstdCompressor().compress(b"") * 200_000)


def test_a_bomb_is_refused_when_it_passes_the_limit() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(300 * MIB))
    assert len(bomb) < MIB
    with pytest.raises(InvalidInput, match="over 256 MiB"):
        decompress(bomb)
    assert len(decompress(zstandard.ZstdCompressor().compress(bytes(3 * MIB)), limit=3 * MIB)) == 3 * MIB


def test_batches_that_the_sdk_compresses_arrive(server: Served) -> None:
    with connected(server) as client:
        # As the server tells clients that are on other machines.
        config = client.holder.get_client_config()
        assert not config.proto_compress_fwdbwd
        client.holder._constructor_kwargs["_client_config"] = config.model_copy(update={"proto_compress_fwdbwd": True})
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3] * 20), loss_fn_inputs={"target_tokens": [1] * 60, "weights": [1.0] * 60})
        assert run.forward_backward([datum] * 50, "cross_entropy").result().metrics
    (arrived,) = {len(message.operation.data) for message in server.engine.executed}
    assert arrived == 50


def test_json_bodies_may_be_compressed_and_other_codings_are_refused_by_name(server: Served) -> None:
    def send(body: bytes, coding: str) -> httpx.Response:
        headers = {"x-api-key": KEY, "content-type": "application/json", "content-encoding": coding}
        return httpx.post(f"{server.url}/api/v1/create_session", content=body, headers=headers)

    body = json.dumps({"sdk_version": "0.38.0"}).encode()
    assert send(zstandard.ZstdCompressor().compress(body), "zstd").json()["session_id"]
    assert send(body, "identity").json()["session_id"]
    for coding, content, field in (("gzip", body, "content-encoding"), ("zstd, zstd", body, "content-encoding"), ("zstd", body, "body")):
        answer = send(content, coding)
        assert (answer.status_code, answer.json()["field"]) == (400, field)


@pytest.mark.parametrize(("host", "compresses"), [("127.0.0.1", False), ("::1", False), ("10.1.2.3", True), ("2001:db8::1", True)])
@pytest.mark.contract("POST /api/v1/client/config")
def test_clients_on_other_machines_are_told_to_compress(server: Served, host: str, compresses: bool) -> None:
    async def ask() -> bool:
        transport = httpx.ASGITransport(create_app(server.services), client=(host, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answer = await http.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers={"x-api-key": KEY})
        return types.ClientConfigResponse.model_validate(answer.json()).proto_compress_fwdbwd

    assert server.do(ask) is compresses
