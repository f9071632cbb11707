"""Agents elsewhere that the server was told of: jobs of their projects train what they are answered."""

from collections.abc import Sequence
from dataclasses import asdict

from bloomery.config import AgentConfig
from bloomery.services.access.principal import Principal
from bloomery.types.errors import NotFound, shown
from bloomery.types.leases import LentAgent


class RemoteAgents:
    """All of them; a project sees its own."""

    def __init__(self, configs: Sequence[AgentConfig]) -> None:
        self._configs = {config.name: config for config in configs}

    def list(self, p: Principal) -> list[AgentConfig]:
        """Those that jobs of the caller's project may have."""
        p.require("read", "train")
        return [config for config in self._configs.values() if p.project in config.projects]

    def check(self, p: Principal, name: str, *, field: str) -> None:
        """NotFound where the caller's project has no such agent."""
        p.require("train")
        if self.lent(p.project, name) is None:
            raise NotFound(f"there is no agent `{shown(name)}` for project `{p.project}`: see GET /api/v1/agents", field=field)

    def lent(self, project: str, name: str) -> LentAgent | None:
        """To the process of a job; None where there is none any more."""
        config = self._configs.get(name)
        if config is None or project not in config.projects:
            return None
        return LentAgent.model_validate({field: value for field, value in asdict(config).items() if field != "projects"})
