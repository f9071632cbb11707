"""The file that names agents elsewhere (`docs/operate.md`)."""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bloomery.config import AgentConfig
from bloomery.recipes.agent_http import address_of, family_of
from bloomery.up.addresses import unknown, wrong_host, wrong_url
from bloomery.up.named import NamedFile


def read(file: Path, jobs: int) -> tuple[AgentConfig, ...]:
    """The agents in a file, each under its name and with a port of its own."""
    given = NamedFile(file, "agents", "agent", "url")
    found = tuple(given.read(AgentConfig))
    ports: dict[int, str] = {}
    for agent in found:
        if (wrong := wrong_url(agent.url)) is not None:
            raise given.refused(f"`{agent.name}.url`: {wrong}", agent.name, "url")
        if (wrong := _wrong_here(agent.host)) is not None:
            raise given.refused(f"`{agent.name}.host`: {wrong}", agent.name, "host")
        if (other := ports.setdefault(agent.port, agent.name)) != agent.name:
            own = f"`{agent.name}` has port {agent.port}, as `{other}` has: each says at a port of its own how its rollouts ended"
            raise given.refused(own, agent.name, "port")
    if not jobs:
        raise given.refused("agents are for jobs, and --jobs 0 runs none: leave out one of them")
    return found


def announce(agent: AgentConfig) -> str:
    """One line for people."""
    at = address_of(agent.host, agent.port)
    return f"agent {agent.name}: {agent.url}, which says at http://{at} how rollouts ended, for {', '.join(agent.projects)}"


def troubles(agent: AgentConfig) -> Iterator[str]:
    """What a job with the agent would fail by if it began now, and that may be mended until then. Its server is not asked."""
    mend = "a job that has it would not get on"
    if (why := unknown(urlsplit(agent.url).hostname or "")) is not None:
        yield f"agent {agent.name}: of its `url` {why}: {mend}"
    if (why := unknown(agent.host, family_of(agent.host)) or _not_ours(agent)) is not None:
        yield f"agent {agent.name}: of its `host` {why}: {mend}"


def _wrong_here(host: str) -> str | None:
    """Why something cannot be the address of this machine that an agent's server is told."""
    if "/" in host or host.startswith("["):
        return f"`{host}` is to be an address or a name alone, without scheme, brackets or port"
    if host.count(":") == 1:
        return f"`{host}` has a port, which stands under `port`: leave it out there"
    if "%" in host:
        return f"`{host}` has a zone, which no URL of it could have: give an address without one"
    if (wrong := wrong_host(host)) is not None:
        return wrong
    if _is_every(host):
        return f"`{host}` is every address of this machine, and none at which the agent's server reaches it: name that one"
    return None


def _is_every(host: str) -> bool:
    try:
        return not any(socket.inet_pton(socket.AF_INET6, host) if ":" in host else socket.inet_aton(host))
    except OSError:
        # It is a name.
        return False


def _not_ours(agent: AgentConfig) -> str | None:
    """Why this machine cannot listen there; that somebody else does is for the job to wait for."""
    try:
        with socket.socket(family_of(agent.host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((agent.host, agent.port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"{address_of(agent.host, agent.port)} cannot be listened at ({error.strerror})"
    return None
