"""Where remote rollouts report to, over plain HTTP, and an agent whose server is one of a few lines; the package's own parts: tests/eval_protocol."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from bloomery.recipes.agent_door import Door
from bloomery.recipes.agents import Episode
from bloomery.recipes.remote_rollouts import Finished, RemoteRollouts, RolloutFailed, problem
from tests.live import free_port


def log(gateway: str, rollout_id: str, status: Any, path: str = "/logs", client: Any = httpx, **more: Any) -> httpx.Response:
    """As the package's handler sends it."""
    body = {"program": "eval_protocol", "status": status, "tags": [f"rollout_id:{rollout_id}"], **more}
    told: httpx.Response = client.post(f"{gateway}{path}", json=body)
    return told


def episode_of(timeout_s: float) -> Episode:
    asked = problem("row 1", [{"role": "user", "content": "How much?"}], tools=[{"type": "function"}], ground_truth=3)
    heard = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "3"}]
    return Episode("7.0", asked, "http://door/v1", "key", "policy", "7.0-abc", "http://door/keys/key/v1", timeout_s, lambda: heard)


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe, suppress(OSError):
        probe.bind(("::1", 0))
        return True
    return False


@contextmanager
def serving(answer: Callable[[dict[str, Any]], int]) -> Iterator[str]:
    """A server whose `/init` gives this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/init"
            status = answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_the_server_is_asked_names_the_attempt_and_where_the_model_is() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> int:
        asked.append(body)
        log(remote.gateway_url, "7.0-abc", {"code": 101, "message": "begun"}).raise_for_status()
        log(remote.gateway_url, "7.0-abc", {"code": 100, "message": "done"}, "/v1/logs", extras={"turns": 2}).raise_for_status()
        return 200

    def score(finished: Finished) -> float:
        assert (finished.rollout_id, finished.messages[-1]["content"], finished.extras) == ("7.0", "3", {"turns": 2})
        return 0.5

    with serving(answer) as url, RemoteRollouts(f"{url}/", score, completion_params={"max_tokens": 4}) as remote:
        assert remote(episode_of(30)) == 0.5
    (body,) = asked
    ids = body.pop("metadata")
    assert (ids.pop("rollout_id"), ids.pop("row_id"), ids.keys()) == ("7.0-abc", "row 1", {"invocation_id", "experiment_id", "run_id"})
    assert body == {
        "completion_params": {"max_tokens": 4, "model": "policy"},
        "messages": [{"role": "user", "content": "How much?"}],
        "tools": [{"type": "function"}],
        "model_base_url": "http://door/keys/key/v1",
        "api_key": "key",
    }


@pytest.mark.parametrize(
    ("code", "raised", "message"),
    [(13, RolloutFailed, "status 13: lost"), (102, RolloutFailed, "status 102: lost"), (4, TimeoutError, "lost")],
)
def test_a_status_that_is_an_error_is_raised(code: int, raised: type[Exception], message: str) -> None:
    def answer(_: dict[str, Any]) -> int:
        log(remote.gateway_url, "7.0-abc", {"code": code, "message": "lost"}).raise_for_status()
        # The first end of a rollout is its end.
        log(remote.gateway_url, "7.0-abc", {"code": 100, "message": "done"}).raise_for_status()
        return 200

    with serving(answer) as url, RemoteRollouts(url) as remote, pytest.raises(raised, match=message):
        remote(episode_of(30))


def test_a_server_that_says_nothing_is_late() -> None:
    with serving(lambda _: 200) as url, RemoteRollouts(url) as remote, pytest.raises(TimeoutError, match=r"how rollout 7\.0-abc ended"):
        remote(episode_of(0.2))


def test_a_server_that_does_not_take_a_rollout_or_does_not_answer_is_named() -> None:
    release = threading.Event()
    with serving(lambda _: 503) as url, RemoteRollouts(url) as remote, pytest.raises(RolloutFailed, match="/init answered 503"):
        remote(episode_of(30))
    with serving(lambda _: 200 if release.wait(60) else 500) as url, RemoteRollouts(url) as remote:
        with pytest.raises(TimeoutError):
            remote(episode_of(0.2))
        release.set()


@pytest.mark.parametrize("reset", [True, False])
def test_a_server_that_breaks_off_before_it_answers_is_named(reset: bool) -> None:
    def break_off() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                while not connection.recv(65536).endswith(b"}"):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = pool.submit(break_off)
        with RemoteRollouts(url) as remote, pytest.raises(RolloutFailed, match=f"{url}/init (broke off|cannot be reached)"):
            remote(episode_of(30))
        done.result(30)


def test_records_that_are_of_no_rollout_here_are_refused_and_notes_without_a_status_are_taken() -> None:
    with RemoteRollouts("http://127.0.0.1:9") as remote:
        url = remote.gateway_url
        assert log(url, "7.0-abc", None).status_code == 200
        assert "7.0-gone" in log(url, "7.0-gone", {"code": 100, "message": ""}).json()["error"]["message"]
        assert log(url, "7.0-gone", {"code": 100, "message": ""}).status_code == 404
        assert log(url, "7.0-gone", {"message": ""}).status_code == 400
        assert httpx.post(f"{url}/logs", json={"status": {"code": 100}, "tags": 3}).status_code == 404
        assert httpx.post(f"{url}/init", json={}).status_code == 404


def test_a_server_that_keeps_its_connection_is_heard_by_the_next_loop_at_the_same_port() -> None:
    gateways, port = [], free_port()

    def answer(_: dict[str, Any]) -> int:
        return log(gateways[-1], "7.0-abc", {"code": 100, "message": "done"}, client=kept).status_code

    with httpx.Client() as kept, serving(answer) as url:
        for _ in range(2):
            with RemoteRollouts(url, lambda _: 1.0, port=port) as remote:
                gateways.append(remote.gateway_url)
                assert remote(episode_of(30)) == 1.0
    assert gateways[0] == gateways[1]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address of IPv6")
def test_a_loop_is_told_at_an_address_of_ipv6() -> None:
    with RemoteRollouts("http://[::1]:9", host="::1") as remote:
        assert remote.gateway_url.startswith("http://[::1]:")
        assert log(remote.gateway_url, "7.0-abc", {"code": 100}).status_code == 404
    with Door("::1") as door:
        assert door.base_url.startswith("http://[::1]:")
        assert httpx.get(f"{door.base_url}/models").status_code == 401


def test_a_server_that_answers_without_end_is_not_listened_to() -> None:
    said = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal said
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while said < 256:
                    self.wfile.write(bytes(1 << 20))
                    said += 1

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, RemoteRollouts(f"http://127.0.0.1:{server.server_address[1]}") as remote:
        with pytest.raises(TimeoutError, match="did not say how"):
            remote(episode_of(0.2))
        server.shutdown()
    assert said < 64
