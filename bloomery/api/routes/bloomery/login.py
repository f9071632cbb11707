"""Logging a browser in with a key, which it shows once: from then on a cookie that no script can read stands for it."""

from typing import Final

from fastapi import APIRouter, Depends, Request, Response

from bloomery.api.browser import forget, keep, own_page, shown_login
from bloomery.api.deps import Caller, Svc
from bloomery.services.access import identity
from bloomery.types.errors import Unauthorized
from bloomery.types.resources import LogIn, Login

MAX_BODY_BYTES: Final = 4096

router = APIRouter(prefix="/login", tags=["keys"], max_body_size=MAX_BODY_BYTES)


@router.post("", dependencies=[Depends(own_page)])
async def log_in(body: LogIn, request: Request, response: Response, services: Svc) -> Login:
    """A login for a key, kept by the browser for 12 hours, or until its key ends."""
    return _kept(request, response, await services.identity.log_in(body.key))


@router.get("")
async def renew(request: Request, response: Response, services: Svc, caller: Caller) -> Login:
    """Who is logged in; the login lives for another 12 hours."""
    if (token := shown_login(request)) is None:
        raise Unauthorized("this request shows a key and no login: POST the key here for one")
    return _kept(request, response, await services.identity.renew(token))


@router.delete("", status_code=204)
async def log_out(request: Request, response: Response, caller: Caller) -> None:
    """Have the browser forget its login."""
    forget(request, response)


def _kept(request: Request, response: Response, made: identity.Login) -> Login:
    keep(request, response, made)
    key = made.key
    return Login(key=key.name, project=key.project, scopes=key.scopes, csrf=made.csrf, ends_us=made.ends_us)
