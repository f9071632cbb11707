"""On whose behalf weights are read: the caller's, or that of another account whose key or token the caller shows."""

from bloomery.services.access.principal import Principal
from bloomery.services.core import Services
from bloomery.types.errors import InvalidInput, Unauthorized


async def reader(services: Services, caller: Principal, weights_access_token: str | None) -> Principal:
    """Who may read them. A bad token is a mistake in the request: the caller's own credential is good."""
    if weights_access_token is None:
        return caller
    try:
        return await services.identity.check(weights_access_token)
    except Unauthorized as error:
        raise InvalidInput(f"`weights_access_token`: {error.message}", field="weights_access_token") from error
