"""Requests that survive a restart of the server, and errors of the server as the errors they are.

A request that may be repeated is repeated on lost connections and on 503 until `patience_s` is over; any other only while it was certainly not
taken up.
"""

import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpx

from bloomery.types import errors
from bloomery.types.errors import BloomeryError, Unavailable

_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 2.0
_PAGE: Final = 200
_BY_STATUS: Final = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    410: errors.Gone,
    503: errors.Unavailable,
}


class Http:
    """One connection pool to one server."""

    def __init__(self, base_url: str, api_key: str, *, transport: httpx.BaseTransport | None, timeout_s: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self._client = httpx.Client(base_url=base_url, headers={"x-api-key": api_key}, transport=transport, timeout=timeout_s)

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at a path; parameters that are None are left out."""
        return self.request("GET", path, params={name: value for name, value in query.items() if value is not None}).json()

    def pages(self, path: str, *, limit: int | None = None, start: int = 0, **query: Any) -> Iterator[Any]:
        """The items of a list from a place on, or the first `limit` of them, page by page."""
        return islice(self._items(path, min(_PAGE, limit or _PAGE), start, query), limit)

    def _items(self, path: str, page_size: int, start: int, query: Mapping[str, Any]) -> Iterator[Any]:
        offset, seen = start, set[str]()
        while True:
            page = self.get(path, limit=page_size, offset=offset, **query)
            for item in page["data"]:
                # What is added at the top of a list meanwhile moves items of this page to the next one.
                if (name := item.get("id")) is None or name not in seen:
                    yield item
                if name is not None:
                    seen.add(name)
            offset += len(page["data"])
            if not page["has_more"]:
                return

    def post(self, path: str, body: Any, *, repeatable: bool = False, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON answer to a JSON body."""
        return self.request("POST", path, json=body, repeatable=repeatable, headers=headers).json()

    def post_once(self, path: str, body: Any) -> Any:
        """The same for what makes or changes something: repeated under one key, it is done once."""
        return self.post(path, body, repeatable=True, headers=self.once())

    @staticmethod
    def once() -> dict[str, str]:
        """Headers of a request that is done once, however often it is sent."""
        return {"idempotency-key": secrets.token_hex(16)}

    def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        paced: bool = False,
        also: Collection[int] = (),
        patience_s: float | None = None,
        **options: Any,
    ) -> httpx.Response:
        """A successful response, or one of a status that is `also` an answer; every other one is raised as the error it carries.

        A `paced` request waits where the server says that there is no room yet (429), as every one does where it is away (503).
        """
        again = repeatable if repeatable is not None else method == "GET"
        busy = (429, 503) if paced else (503,)
        deadline, pause_s = time.monotonic() + (self.patience_s if patience_s is None else min(patience_s, self.patience_s)), _PAUSE_S
        while True:
            try:
                response = self._client.request(method, path, **options)
                if response.is_success or response.status_code in also:
                    return response
                problem = error_of(response)
                worth_it = response.status_code in busy
            except httpx.TransportError as error:
                problem = self._lost(method, path, error)
                worth_it = again or isinstance(error, httpx.ConnectError)
            if not worth_it or time.monotonic() + pause_s > deadline:
                raise problem
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def download(self, path: str, target: Path, **query: Any) -> None:
        """Write the bytes at a path to a new file; one that ends early is an error, and what arrived of it is removed."""
        params = {name: value for name, value in query.items() if value is not None}
        try:
            with _whole(target) as file, self._client.stream("GET", path, params=params) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                for piece in response.iter_raw():
                    file.write(piece)
        except httpx.TransportError as error:
            raise Unavailable(f"{path} broke off: {type(error).__name__}: {error}; the server's log says more") from error

    @contextmanager
    def stream(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Iterator[Iterator[str]]:
        """The `data:` lines of a server-sent stream, as they come. A stream is not repeated."""
        try:
            with self._client.stream("POST", path, json=body, headers=headers) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield (line.removeprefix("data:").strip() for line in _lines(response.iter_text()) if line.startswith("data:"))
        except httpx.TransportError as error:
            raise self._lost("POST", path, error) from error

    def _lost(self, method: str, path: str, error: httpx.TransportError) -> Unavailable:
        return Unavailable(f"{method} {self._client.base_url.join(path)}: {type(error).__name__}: {error}")


@contextmanager
def _whole(target: Path) -> Iterator[BinaryIO]:
    """A new file, which goes again unless all of it is written: the disk may be full, and somebody may press Ctrl-C."""
    with target.open("xb") as file:
        try:
            yield file
            file.flush()
        except BaseException:
            target.unlink()
            raise


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    # httpx's own line iterator also breaks at separators that may stand inside a JSON text.
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        yield from whole
    yield rest


def error_of(response: httpx.Response) -> BloomeryError:
    """The error that an unsuccessful response carries."""
    kind = _BY_STATUS.get(response.status_code) or (errors.InvalidInput if response.is_client_error else errors.WorkerError)
    try:
        body = response.json()
        # The Training API writes its errors flat, the others as an object.
        flat = isinstance(body["error"], str)
        return error_in({"message": body["error"], "code": body.get("code"), "field": body.get("field")} if flat else body["error"], otherwise=kind)
    except (ValueError, KeyError, TypeError, AttributeError):
        return kind(f"the server answers {response.status_code}: {response.text[:200]}")


def error_in(envelope: Mapping[str, Any], otherwise: type[BloomeryError] = errors.WorkerError) -> BloomeryError:
    """The error in either contract's envelope; `otherwise` where its code says too little."""
    kind = errors.BY_CODE.get(str(envelope.get("code"))) or otherwise
    return kind(envelope["message"], field=envelope.get("field", envelope.get("param")))
