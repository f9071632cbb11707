"""Logging a browser in with a key, which it shows once.

From then on a cookie that no script can read stands for it, together with a word that only the page that logged in was told.
"""

from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response

from bloomery.api.browser import forget, keep, over_tls, own_page, shown_login
from bloomery.api.deps import Caller, Svc
from bloomery.services.access import identity
from bloomery.types.errors import Unauthorized
from bloomery.types.keys import LogIn, Login, NewLogin

MAX_BODY_BYTES: Final = 4096

router = APIRouter(prefix="/login", tags=["keys"], max_body_size=MAX_BODY_BYTES)


@router.post("", dependencies=[Depends(own_page)])
async def log_in(body: LogIn, request: Request, response: Response, services: Svc) -> NewLogin:
    """A login for a key, kept by the browser for 12 hours, or until its key ends; each of its requests repeats `csrf` as `x-csrf-token`."""
    made = await services.identity.log_in(body.key, tls=over_tls(request))
    keep(request, response, made.login)
    return NewLogin(**_shown(made.login), csrf=made.csrf)


@router.get("")
async def renew(request: Request, response: Response, services: Svc, caller: Caller) -> Login:
    """Who is logged in; the login lives for another 12 hours, and ends 7 days after the key was shown."""
    if (token := shown_login(request)) is None:
        raise Unauthorized("this request shows a key and no login: POST the key here for one")
    made = await services.identity.renew(token)
    keep(request, response, made)
    return Login(**_shown(made))


@router.delete("", status_code=204)
async def log_out(request: Request, response: Response, caller: Caller) -> None:
    """Have the browser forget its login."""
    forget(request, response)


def _shown(made: identity.Login) -> dict[str, Any]:
    return {"key": made.key.name, "project": made.key.project, "scopes": made.key.scopes, "ends_us": made.ends_us}
