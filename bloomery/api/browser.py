"""Requests of browsers, which are known by a cookie: the login that it holds, and what a request that shows nothing else has to prove.

Browsers send a cookie along whoever wrote the page that asks, and to every server of the host, whatever its port. So the name that was asked for must
be one of this server (another one may have been pointed at this address a moment ago: DNS rebinding), the page one of its own, and the request
repeats a word that only this page was told: neither another page (cross-site request forgery) nor another server that was sent the cookie has it.
Requests with a key prove enough by it: no page has one that it was not given.
"""

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
_BY_COOKIE: Final = (("GET", "/api/v1/live"), ("DELETE", "/api/v1/login"))
"""What a cookie alone is good for. Browsers send no header with an event source, which tells topics and nothing of them; and who logs out may have
lost the word."""
_OVER_TLS: Final = "__Host-"
"""How the name of a cookie begins that browsers take over TLS alone, and for this very host: nobody without TLS or with another name writes it."""
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::(?P<port>\d*))?", re.IGNORECASE)


async def caller_by_login(request: Request, token: str) -> Principal:
    """Who is behind a login that comes without a key; Forbidden where the request does not prove what it has to."""
    services: Services = request.app.state.services
    _check_host(request, services.public_hosts)
    _check_origin(request)
    found = await services.identity.logged_in(token)
    if (request.method, request.scope["path"]) not in _BY_COOKIE and not found.proved_by(request.headers.get(CSRF, "")):
        raise Forbidden(f"a cookie alone proves nothing: repeat the `csrf` of the login in the header `{CSRF}`, or show a key", field=CSRF)
    return found.principal


async def own_page(request: Request) -> None:
    """Refuse what another page may have had a browser send."""
    services: Services = request.app.state.services
    _check_host(request, services.public_hosts)
    _check_origin(request)


def shown_login(request: Request) -> str | None:
    """The token of the login that came with a request which shows no key."""
    if presented_key(request):
        return None
    kept = request.cookies.get(_cookie(request, tls=True))
    # Over TLS the other one may be written by whoever answers for this host without it.
    return kept if kept is not None or over_tls(request) else request.cookies.get(_cookie(request))


def keep(request: Request, response: Response, made: Login) -> None:
    """Have the browser keep a login until it ends, where no script reads it and no page of others has it sent."""
    lives_s = max(made.ends_us - now_us(), 0) // 1_000_000
    name = _cookie(request, tls=made.tls)
    response.set_cookie(name, made.token, max_age=lives_s, path="/", secure=made.tls, httponly=True, samesite="strict")
    response.headers["cache-control"] = "no-store"


def forget(request: Request, response: Response) -> None:
    """Have the browser forget its login."""
    tls = over_tls(request)
    response.delete_cookie(_cookie(request, tls=tls), path="/", secure=tls, httponly=True, samesite="strict")


def over_tls(request: Request) -> bool:
    """Whether the browser speaks TLS, if only to a proxy: then its page says so, where it sends something."""
    return request.url.scheme == "https" or request.headers.get("origin", "").lower().startswith("https://")


def _cookie(request: Request, *, tls: bool = False) -> str:
    # Browsers keep cookies by host alone: two servers of one would take each other's away. The port is the one that the browser knows, which behind a
    # proxy is not the one that is listened on.
    found = _HOST.fullmatch(request.headers.get("host", ""))
    port = found["port"] if found else None
    return (_OVER_TLS if tls else "") + (f"bloomery-{port}" if port else "bloomery")


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
