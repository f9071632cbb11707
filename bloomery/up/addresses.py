"""Addresses in files of `up`: what can be said of them before anybody is asked there, and whether their names are known now."""

import ipaddress
import re
import socket
import threading
from typing import Final
from urllib.parse import urlsplit

_RESOLVED_WITHIN_S: Final = 2.0
_BRACKETED: Final = re.compile(r"\[(?P<address>[^\[\]]*:[^\[\]]*)\](:.*)?")
_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def wrong_url(url: str) -> str | None:
    """What no client could ask of an `http` URL; None: nothing."""
    authority = url.partition("://")[2].partition("/")[0]
    if "[" not in authority and authority.count(":") > 1:
        return f"`{authority}` has more than one colon: an IPv6 address stands in brackets, as in http://[::1]:3000"
    # Not every release of Python looks at what stands in brackets and behind them.
    if re.search(r"[\[\]]", authority) and not ((bracketed := _BRACKETED.fullmatch(authority)) and is_address(bracketed["address"])):
        return f"`{authority}` has brackets that hold no IPv6 address, as in http://[::1]:3000"
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return f"`{authority}` is no name of a host"
    if authority.endswith(":"):
        return f"`{authority}` ends where a port is to stand: give it, or leave out the colon"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return f"the port of `{authority}` is none: it is a number from 1 to 65535"
    return wrong_host(host or "")


def wrong_host(host: str) -> str | None:
    """Why something is neither an address nor a name; None: it may be."""
    if not host:
        return "there is no host in it"
    if is_address(host):
        return None
    if ":" in host:
        return f"`{host}` is no IPv6 address"
    if re.fullmatch(r"[\d.]+", host):
        return None if _is_short_address(host) else f"`{host}` is no IPv4 address"
    try:
        ascii_host = host.encode("idna").decode()
    except UnicodeError:
        return f"`{host}` is no name of a host"
    if not all(map(_LABEL.fullmatch, ascii_host.removesuffix(".").split("."))):
        return f"`{host}` is no name of a host: those have letters, digits and hyphens between dots, and no more than 63 of them"
    return None


def unknown(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str | None:
    """Why the name of a host has no address now, as far as the resolver of this machine says in time; None: it has one."""
    if is_address(host):
        return None
    said: list[str | None] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
            said.append(None)
        except OSError as error:
            said.append(error.strerror or str(error))

    # A resolver that nobody answers is waited for by the half minute.
    asking = threading.Thread(target=ask, daemon=True, name="resolver")
    asking.start()
    asking.join(_RESOLVED_WITHIN_S)
    if not said:
        return f"`{host}` was not resolved within {_RESOLVED_WITHIN_S:g} s"
    return None if said[0] is None else f"`{host}` does not resolve ({said[0]})"


def is_address(host: str) -> bool:
    """Of IPv4 in full, or of IPv6."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_short_address(host: str) -> bool:
    # As 127.1, which resolvers know.
    try:
        socket.inet_aton(host)
    except OSError:
        return False
    return True
