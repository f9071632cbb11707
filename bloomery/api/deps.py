"""What routes ask for: the services of this process and the caller."""

from typing import Annotated

from fastapi import Depends, Request

from bloomery.api.auth import caller
from bloomery.api.headers import answer_headers
from bloomery.services.access.principal import Principal
from bloomery.services.core import Services


async def services(request: Request) -> Services:
    """The services that the app was created with."""
    found: Services = request.app.state.services
    return found


Svc = Annotated[Services, Depends(services)]
Caller = Annotated[Principal, Depends(caller)]


async def metered(request: Request) -> None:
    """Take one of the requests that the key may make; where it stands is told with whatever the answer is."""
    limits, who = (await services(request)).limits, await caller(request)
    answer_headers(request.scope).append(lambda: limits.headers(who))
    limits.request(who)
