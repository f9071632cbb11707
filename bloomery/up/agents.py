"""The file that names agents elsewhere (`docs/operate.md`)."""

from pathlib import Path

from bloomery.config import AgentConfig
from bloomery.up.named import NamedFile


def read(file: Path, jobs: int) -> tuple[AgentConfig, ...]:
    """The agents in a file, each under its name and with a port of its own."""
    given = NamedFile(file, "agents", "agent", "url")
    found = tuple(given.read(AgentConfig))
    ports: dict[int, str] = {}
    for agent in found:
        if (other := ports.setdefault(agent.port, agent.name)) != agent.name:
            raise given.refused(f"`{agent.name}` has port {agent.port}, as `{other}` has: each says at a port of its own how its rollouts ended")
    if not jobs:
        raise given.refused("agents are for jobs, and --jobs 0 runs none: leave out one of them")
    return found


def announce(agent: AgentConfig) -> str:
    """One line for people."""
    return f"agent {agent.name}: {agent.url}, which says at http://{agent.host}:{agent.port} how rollouts ended, for {', '.join(agent.projects)}"
