"""The key or token that a request shows in its headers."""

from typing import Final

from fastapi import Request

_BEARER: Final = "bearer "


def presented_key(request: Request) -> str | None:
    """The key as the caller sent it; `X-API-Key` wins."""
    if key := request.headers.get("x-api-key"):
        return key
    authorization = request.headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None
