"""Models behind any endpoint that speaks OpenAI's contract: chat completions with structured outputs, and embeddings."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx

from bloomery.grade.models import Answer, Question, Vectors
from bloomery.grade.template import unicode
from bloomery.types import errors
from bloomery.types.errors import BloomeryError, InvalidInput, RateLimited, Unavailable, shown
from bloomery.types.grading import GradeUsage

TIMEOUT_S: Final = 120.0
MAX_ANSWER_BYTES: Final = 16 << 20
_REASON_CHARS: Final = 500
_SCHEMA_NAME: Final = "verdict"
_STRANGE: Final = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What taking an answer apart raises that is not of the contract."""
_MAX_TOKENS: Final = 1 << 40
_BY_STATUS: Final = {401: errors.Unauthorized, 403: errors.Forbidden, 404: errors.NotFound}


class Endpoint:
    """One endpoint: `base_url` ends where `/chat/completions` begins. Closed by leaving the `async with`; nothing is asked twice here."""

    def __init__(
        self, base_url: str, api_key: str | None, *, transport: httpx.AsyncBaseTransport | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # Proxies of the environment are for the user's own programs, and would see prompts.
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, transport=transport, timeout=timeout_s, trust_env=False)
        self._host, self._key = httpx.URL(base_url).host, api_key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def ask(self, question: Question) -> Answer:
        """One answer of the form that is asked for."""
        began_s = time.monotonic()
        said = await self._post("chat/completions", _chat_body(question))
        took_s = time.monotonic() - began_s
        try:
            choice = said["choices"][0]
            message = choice["message"]
            text, refusal = _text(message.get("content")), _text(message.get("refusal"))
            return Answer(text or "", _usage(said), choice.get("finish_reason") != "length", refusal, took_s)
        except _STRANGE:
            raise self._strange() from None

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        said = await self._post("embeddings", {"model": model, "input": list(texts)})
        try:
            found = {item["index"]: [float(number) for number in item["embedding"]] for item in said["data"]}
            return Vectors([found[index] for index in range(len(texts))], _usage(said))
        except _STRANGE:
            raise self._strange() from None

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                content = await _read(answer)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._host} does not answer ({type(error).__name__}): is it running, and is its address right?") from error
        if not answer.is_success:
            raise self._refusal(answer, content)
        try:
            return httpx.Response(200, content=content).json()
        except (ValueError, RecursionError):
            raise self._strange() from None

    def _refusal(self, answer: httpx.Response, content: bytes) -> BloomeryError:
        said = _message(content)
        if self._key:
            # Some repeat the key that they refuse.
            said = said.replace(self._key, "the key")
        told = f"{self._host} answers {answer.status_code}: {shown(said, _REASON_CHARS)}"
        if answer.status_code == 429:
            return RateLimited(told, retry_after_s=_seconds(answer.headers.get("retry-after")))
        if answer.status_code >= 500 or answer.status_code in (408, 409):
            return Unavailable(told)
        return _BY_STATUS.get(answer.status_code, InvalidInput)(told, field="model" if answer.status_code == 404 else None)

    def _strange(self) -> Unavailable:
        return Unavailable(f"what {self._host} answers is not of OpenAI's contract")


def _chat_body(question: Question) -> dict[str, Any]:
    params = question.params
    asked = {
        "model": question.model,
        "messages": list(question.messages),
        "response_format": None if question.schema is None else _form(question.schema),
        "seed": params.seed,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_completion_tokens": params.max_completions_tokens,
        "reasoning_effort": params.reasoning_effort,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _form(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": _SCHEMA_NAME, "schema": schema, "strict": True}}


async def _read(answer: httpx.Response) -> bytes:
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise Unavailable(f"an answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(content)


def _message(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        return unicode(str(httpx.Response(200, content=content).json()["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return text


def _text(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise TypeError("no text")
    return None if given is None else unicode(given)


def _usage(said: Any) -> GradeUsage:
    usage = said.get("usage") or {}
    prompt, completion = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    if not (0 <= prompt <= _MAX_TOKENS and 0 <= completion <= _MAX_TOKENS):
        raise ValueError("no number of tokens")
    return GradeUsage(prompt_tokens=prompt, completion_tokens=completion)


def _seconds(told: str | None) -> float:
    try:
        return max(0.0, float(told or 1))
    except ValueError:
        return 1.0
