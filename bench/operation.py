"""The server's own cost of an operation: `python -m bench.operation` prints one JSON line.

A model of one narrow block makes the computation almost nothing; what is left between submission and result is HTTP, journal (with its fdatasync),
socket and event loops. Measured one operation at a time: over a bare connection with a body that lies ready (`bare_forward`), through our client and
through the `tinker` SDK, beside the limits of this machine in the same run: an HTTP request that does nothing, and an fdatasync of one small record.
`engine_forward` is what the engine computed for each `forward`; `server_own` is the rest of `bare_forward`, from submission to result. What a client
takes for itself is in `forward`, `step` (a `forward_backward` and an `optim_step`) and `sdk_forward`.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tinker

from bench.line import Line, parser_of
from bench.shapes import EMPTY, supervised, write_directory
from bloomery.cli.demo_server import Server, serving
from bloomery.client import Client, TrainingRun
from bloomery.types.operations import ForwardBackward
from bloomery.types.wire import encode


def main() -> None:
    """Measure one operation after the other."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    line = Line("operation")
    with tempfile.TemporaryDirectory() as place:
        model = write_directory(EMPTY, Path(place) / "empty")
        with serving(str(model), keep=False) as server:
            figures = {**_bare(server, rounds), **_client(server, rounds), **_sdk(server, rounds)}
        figures["fdatasync"] = _median(_synced(Path(place)), rounds)
    line.tell({"rounds": rounds, "ratio": _ratio(figures), "milliseconds": _rounded(figures)})


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def _ratio(figures: dict[str, float]) -> float:
    """The server's own cost over the least it could be: two requests, and a synced record for the operation and for its result."""
    return round(figures["server_own"] / (2 * figures["http_request"] + 2 * figures["fdatasync"]), 2)


def _bare(server: Server, rounds: int) -> dict[str, float]:
    """Two requests per operation over one connection: its submission, and one that waits for its result."""
    with Client(server.url, server.key) as client, closing(HTTPConnection(urlsplit(server.url).netloc)) as connection:
        run = client.create_run(client.models()[0].alias, rank=1, seed=0)
        headers = {"x-api-key": server.key, "content-type": "application/msgpack"}
        body = encode(ForwardBackward(loss="cross_entropy", loss_config={}, data=supervised(EMPTY.vocab_size, [4], 0), backward=False))
        numbers = itertools.count(run.state().next_seq)

        def ask(method: str, path: str, content: bytes | None = None, *, status: int = 200) -> None:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            said = response.read()
            if response.status != status:
                raise SystemExit(f"{method} {path}: {response.status}: {said[:500]!r}")

        def forward() -> None:
            path = f"/api/v1/runs/{run.id}/operations/{next(numbers)}"
            ask("POST", path, body, status=202)
            ask("GET", f"{path}?wait=20")

        figures = {"bare_forward": _median(forward, rounds), "http_request": _median(lambda: ask("GET", "/api/v1/models"), rounds)}
        engine = _median_of_engine(run, rounds)
        return {**figures, "engine_forward": engine, "server_own": figures["bare_forward"] - engine}


def _client(server: Server, rounds: int) -> dict[str, float]:
    with Client(server.url, server.key) as client:
        run = client.create_run(client.models()[0].alias, rank=1, seed=0)
        data = list(supervised(EMPTY.vocab_size, [4], 0))
        return {
            "forward": _median(lambda: run.forward(data).result(), rounds),
            "step": _median(lambda: (run.forward_backward(data), run.optim_step(1e-4).result()), rounds),
            "client_request": _median(client.models, rounds),
        }


def _median_of_engine(run: TrainingRun, rounds: int) -> float:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seconds = [value for metric in run.metrics() if (value := metric.values.get("forward/seconds")) is not None]
        if len(seconds) >= rounds:
            return statistics.median(seconds) * 1e3
    raise SystemExit("the metrics of the operations did not appear")


def _sdk(server: Server, rounds: int) -> dict[str, float]:
    with _sdk_run(server) as run:
        tokens = [1, 2, 3, 4]
        inputs: dict[str, Any] = {"target_tokens": tokens, "weights": [1.0] * 4}
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)]
        return {"sdk_forward": _median(lambda: run.forward(data, "cross_entropy").result(), rounds)}


@contextmanager
def _sdk_run(server: Server) -> Iterator[tinker.TrainingClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as service:
        yield service.create_lora_training_client(base_model="empty", rank=1).result()


def _synced(place: Path) -> Callable[[], object]:
    file = (place / "record").open("wb", buffering=0)

    def write() -> None:
        file.write(b"x" * 200)
        os.fdatasync(file.fileno())

    return write


def _median(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
