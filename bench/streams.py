"""What the api itself costs: `python -m bench.streams` prints one JSON line.

The engine's end is a process of a few lines that speaks the protocol and says tokens from a list, so that what is measured is the api alone: HTTP,
rendering, socket, text, records, metrics. First one request at a time, beside the same request put to that end directly; `overhead` is the
difference, and `empty_request` what HTTP takes for nothing. Then so many streams at once, one token of each per step as from a real engine: errors,
the api's processor time per request, and how late the tokens come. The api, the engine's end and the client share the machine's cores;
`client_cpu_ms` is what the client took of them.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.line import Line, parser_of
from bloomery.config import ApiConfig, ModelConfig, to_json
from bloomery.models import tiny
from bloomery.types import protocol
from bloomery.types.arrays import Array
from bloomery.types.generation import Abort, Generate, SampledToken, SampleFinished, SamplerEvent, SamplingParams, Weights
from bloomery.types.protocol import BaseInfo, Drain, Drained, SamplerEvents, Welcome

KEY = "tml-bench-streams-key"
BASE = "bench"
TOKENS = [ord(letter) for letter in "The csv module reads rows of files. "]
START_S = 60.0
READ_BYTES = 1 << 22


class Served(NamedTuple):
    """One request as its client saw it, in seconds from its beginning."""

    ok: bool
    first_s: float
    whole_s: float


def main() -> None:
    """Measure one, and many."""
    parser = parser_of(__doc__)
    for name, value in (("rounds", 300), ("streams", 1000), ("tokens", 32), ("step-ms", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    line = Line("streams")
    figures = {"one": asyncio.run(one(asked.rounds)), "many": asyncio.run(many(asked.streams, asked.tokens, asked.step_ms / 1000))}
    setting = {"rounds": asked.rounds, "streams": asked.streams, "tokens": asked.tokens, "step_ms": asked.step_ms}
    line.tell({**setting, **figures})


async def one(rounds: int) -> dict[str, float]:
    """One request at a time."""
    async with _api(step_s=0.0) as api:
        single, sixteen = [await _one_by_one(api, tokens, rounds) for tokens in (1, 16)]
        direct, empty = await _directly(api.address, rounds), await _empty(api.port, rounds)
    overhead, per_token = _median_ms(single) - direct, (_median_ms(sixteen) - _median_ms(single)) / 15
    quick = 1000 * statistics.quantiles([each.whole_s for each in single], n=10)[0] - direct
    found = {
        "request": _median_ms(single),
        "direct": direct,
        "overhead": overhead,
        "overhead_p10": quick,
        "empty_request": empty,
        "per_token": per_token,
    }
    return {f"{name}_ms": round(value, 3) for name, value in found.items()}


async def many(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    """So many streams at once."""
    async with _api(step_s=step_s) as api:
        await asyncio.gather(*(_request(api, tokens) for _ in range(16)))
        api_s, client_s, began = _cpu_s(api.pid), time.process_time(), time.perf_counter()
        served = await asyncio.gather(*(_request(api, tokens) for _ in range(streams)))
        wall_s, client_s, api_s = time.perf_counter() - began, time.process_time() - client_s, _cpu_s(api.pid) - api_s
    good = [each for each in served if each.ok]
    return {
        "errors": len(served) - len(good),
        "wall_s": round(wall_s, 2),
        "cpu_ms_per_request": round(1000 * api_s / streams, 2),
        "client_cpu_ms": round(1000 * client_s / streams, 2),
        "first_token_p50_ms": round(1000 * statistics.median(each.first_s for each in good)),
        "whole_p50_ms": round(1000 * statistics.median(each.whole_s for each in good)),
        "whole_max_ms": round(1000 * max(each.whole_s for each in good)),
        "whole_of_engine_ms": round(1000 * tokens * step_s),
    }


async def _one_by_one(api: "_Api", tokens: int, rounds: int) -> list[Served]:
    served = [await _request(api, tokens) for _ in range(rounds + 20)][20:]
    assert all(each.ok for each in served), "a request failed"
    return served


def _median_ms(served: list[Served]) -> float:
    return 1000 * statistics.median(each.whole_s for each in served)


class _Api(NamedTuple):
    """A running api and the socket of the engine's end."""

    port: int
    pid: int
    address: Path


@asynccontextmanager
async def _api(step_s: float) -> AsyncIterator[_Api]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        address = folder / "s"
        engine = multiprocessing.get_context("spawn").Process(target=_run_engine, args=(address, step_s), daemon=True)
        engine.start()
        port = _free_port()
        model = ModelConfig(alias="tiny", path=str(tiny.PATH), base_hash=BASE, dtype="float32", threads=1, socket=str(address))
        config = ApiConfig(data_dir=place, host="127.0.0.1", port=port, record="full", models=(model,), max_waiting=1 << 20)
        (folder / "api_key").write_text(KEY)
        (folder / "config.json").write_text(to_json(config))
        # As the supervisor starts it.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "bloomery.api", str(folder / "config.json")]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        try:
            await _until_ready(port)
            yield _Api(port, process.pid, address)
        finally:
            process.terminate()
            process.wait()
            engine.terminate()
            engine.join()


async def _until_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if await _healthy(port):
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the api did not start")


async def _healthy(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return b" 200 " in answer.partition(b"\r\n")[0]


async def _empty(port: int, rounds: int) -> float:
    """Milliseconds of a request that does nothing."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        await _healthy(port)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


async def _request(api: _Api, tokens: int) -> Served:
    """A streamed chat completion on a connection of its own."""
    said = {"model": "tiny", "messages": [{"role": "user", "content": "Which module reads CSV files?"}], "stream": True, "max_tokens": tokens}
    body = json.dumps(said).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=READ_BYTES)
        writer.write(head.encode() + body)
        first = await reader.readuntil(b"data: ")
        first_s = time.perf_counter() - began
        rest = await reader.readuntil(b"0\r\n\r\n")
        whole_s = time.perf_counter() - began
        writer.close()
    except (OSError, asyncio.IncompleteReadError):
        return Served(False, 0.0, 0.0)
    return Served(first.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in rest, first_s, whole_s)


async def _directly(address: Path, rounds: int) -> float:
    """Milliseconds of the same one-token request at the engine's end, without the api."""
    reader, writer = await asyncio.open_unix_connection(address)
    await _read(reader)
    prompt, params = Array.of(np.array(TOKENS, np.int32)), SamplingParams(max_tokens=1, seed=0)
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        writer.write(protocol.frame(Generate(request_id=str(number), weights=Weights(version=BASE), prompt=prompt, params=params)))
        while not _ends(protocol.parse_from_engine(await _read(reader))):
            pass
        seconds.append(time.perf_counter() - began)
    writer.close()
    return 1000 * statistics.median(seconds)


def _ends(message: protocol.FromEngine) -> bool:
    return isinstance(message, SamplerEvents) and any(isinstance(event, SampleFinished) for event in message.events)


def _run_engine(address: Path, step_s: float) -> None:
    asyncio.run(_Engine(step_s).listen(address))


async def _say_alive(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(protocol.ALIVE_EVERY_S)
        writer.write(protocol.frame(protocol.Alive()))


class _Engine:
    """The engine's end: every request gets the same tokens, one per step, all requests in one frame. A step of 0 s comes as soon as there is work."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def listen(self, address: Path) -> None:
        server = await asyncio.start_unix_server(self._converse, address)
        await server.serve_forever()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        base = BaseInfo(base_hash=BASE, model_type="bench", vocab_size=1 << 20, context=2048, parameters=1, dtype="float32", parts={})
        pid = os.getpid()
        welcome = Welcome(boot_id="boot", pid=pid, base=base, numerics="bench", sampling_numerics="bench", bit_exact=False, runs={})
        writer.write(protocol.frame(welcome))
        at_work: dict[str, list[int]] = {}
        there_is_work = asyncio.Event()
        stepping = asyncio.create_task(self._step(at_work, there_is_work, writer))
        beating = asyncio.create_task(_say_alive(writer))
        try:
            while True:
                match protocol.parse_to_engine(await _read(reader)):
                    case Generate() as request:
                        at_work[request.request_id] = [0, request.params.max_tokens]
                        there_is_work.set()
                    case Abort(request_id=request_id):
                        at_work.pop(request_id, None)
                    case Drain():
                        writer.write(protocol.frame(Drained()))
        except asyncio.IncompleteReadError:
            stepping.cancel()
            beating.cancel()

    async def _step(self, at_work: dict[str, list[int]], there_is_work: asyncio.Event, writer: asyncio.StreamWriter) -> None:
        while True:
            await there_is_work.wait()
            if self._step_s:
                await asyncio.sleep(self._step_s)
            events: list[SamplerEvent] = []
            for request_id, place in list(at_work.items()):
                position, place[0] = place[0], place[0] + 1
                token = TOKENS[position % len(TOKENS)]
                events.append(SampledToken(request_id=request_id, sample=0, position=position, token=token, logprob=-1.0))
                if place[0] == place[1]:
                    events.append(SampleFinished(request_id=request_id, sample=0, reason="length"))
                    del at_work[request_id]
            writer.write(protocol.frame(SamplerEvents(events=tuple(events))))
            await writer.drain()
            if not at_work:
                there_is_work.clear()


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(protocol.frame_length(await reader.readexactly(4)))


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
