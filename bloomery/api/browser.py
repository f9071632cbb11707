"""Requests of browsers, which are known by a cookie: the login that it holds, and what a request that shows nothing else has to prove.

Browsers send a cookie along whoever wrote the page that asks. So the name that was asked for must be one of this server (another one may have been
pointed at this address a moment ago: DNS rebinding), and whatever changes something comes from its own page and repeats a word that only this page
was told (cross-site request forgery). Requests with a key prove enough by it: no page has one that it was not given.
"""

import hmac
import ipaddress
import re
import socket
from functools import cache
from typing import Final

from fastapi import Request, Response

from bloomery.api.credentials import presented_key
from bloomery.services.access.identity import Login
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.types.errors import Forbidden, shown
from bloomery.types.ids import now_us

CSRF: Final = "x-csrf-token"
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::\d*)?", re.IGNORECASE)


async def caller_by_login(request: Request, token: str) -> Principal:
    """Who is behind a login that comes without a key; Forbidden where the request does not prove what it has to."""
    services: Services = request.app.state.services
    _check_host(request, services.public_hosts)
    found = await services.identity.logged_in(token)
    if request.method not in _SAFE:
        _check_origin(request)
        if not hmac.compare_digest(request.headers.get(CSRF, "").encode(), found.csrf.encode()):
            raise Forbidden(f"a login alone changes nothing: repeat its `csrf` in the header `{CSRF}`, or show a key", field=CSRF)
    return found.principal


async def own_page(request: Request) -> None:
    """Refuse what another page may have had a browser send."""
    services: Services = request.app.state.services
    _check_host(request, services.public_hosts)
    _check_origin(request)


def shown_login(request: Request) -> str | None:
    """The token of the login that came with a request which shows no key."""
    return None if presented_key(request) else request.cookies.get(_cookie(request))


def keep(request: Request, response: Response, made: Login) -> None:
    """Have the browser keep a login until it ends, where no script reads it and no page of others has it sent."""
    lives_s = max(made.ends_us - now_us(), 0) // 1_000_000
    over_tls = request.url.scheme == "https"
    response.set_cookie(_cookie(request), made.token, max_age=lives_s, path="/", secure=over_tls, httponly=True, samesite="strict")
    response.headers["cache-control"] = "no-store"


def forget(request: Request, response: Response) -> None:
    """Have the browser forget its login."""
    response.delete_cookie(_cookie(request), path="/", secure=request.url.scheme == "https", httponly=True, samesite="strict")


def _cookie(request: Request) -> str:
    # Browsers keep cookies by host alone: two servers of one would take each other's away.
    server = request.scope.get("server")
    return f"bloomery-{server[1] if server else 0}"


def _check_host(request: Request, public_hosts: frozenset[str]) -> None:
    asked = request.headers.get("host", "")
    found = _HOST.fullmatch(asked)
    name = "" if found is None else (found["address"] or found["name"]).lower().removesuffix(".")
    if not (name == "localhost" or name in public_hosts or name in _machine() or _is_address(name)):
        which = f"a browser asks for `{shown(asked)}`, which this server does not know for its name"
        raise Forbidden(f"{which}: use its address, or start it with `bloomery up --public-host NAME` if that is one of its names", field="host")


def _check_origin(request: Request) -> None:
    origin = request.headers.get("origin")
    if origin is None:
        return
    # Behind a proxy that speaks TLS the request comes by http.
    schemes = ("https",) if request.url.scheme == "https" else ("http", "https")
    if origin.lower() not in {f"{scheme}://{request.headers.get('host', '').lower()}" for scheme in schemes}:
        raise Forbidden(f"this was sent by a page of `{shown(origin)}`, and only pages of this server may: open the page where it is", field="origin")


@cache
def _machine() -> frozenset[str]:
    """What this machine calls itself, with and without its domain."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]} - {""})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
