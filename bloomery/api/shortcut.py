"""The way to a route by the beginning of its path. FastAPI tries hundreds one by one, and those of a router within another twice or more."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any, Final, NamedTuple, NoReturn

from fastapi.routing import RouteContext, iter_route_contexts
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Receive, Scope, Send

_FOUND: Final = "bloomery.found"


class Shortcut(BaseRoute):
    """Stands before `routes` and takes what the first of them takes that takes it; what none does (404, 405, redirects) they answer themselves."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """In the order of all."""
        if scope["type"] == "http" and not scope.get("root_path"):
            for _, route in self._known.candidates(scope["path"]):
                match, found = route.matches(scope)
                if match is Match.FULL:
                    return match, {**found, "route": route.original_route, _FOUND: route.app}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the route does that was found."""
        await scope[_FOUND](scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> NoReturn:
        """The routes themselves know their names."""
        raise NoMatchFound(name, path_params)

    @cached_property
    def _known(self) -> "_Known":
        # When the first request comes, because FastAPI works out then what routes take and give.
        known = defaultdict(list)
        for place, route in enumerate(iter_route_contexts(self._routes)):
            literal = list(takewhile(lambda part: "{" not in part, (route.path_format or "").split("/")))
            known["/".join(literal)].append((place, route))
        return _Known(dict(known), max(beginning.count("/") for beginning in known) + 1)


class _Known(NamedTuple):
    routes: dict[str, list[tuple[int, RouteContext]]]
    """By the parts of their paths before the first that is a parameter; each with its place among all."""
    depth: int
    """Parts of the longest of those."""

    def candidates(self, path: str) -> list[tuple[int, RouteContext]]:
        """Whose paths begin as this one does."""
        # A route's regular expression overlooks the end of a line behind its path.
        parts = path.removesuffix("\n").split("/", self.depth)[: self.depth]
        return sorted(each for beginning in accumulate(parts, "{}/{}".format) for each in self.routes.get(beginning, ()))
