"""Who calls, by a key, by a token that stands for it, or by the login of a browser.

A key is exchanged for a token that says whose it is and lives for an hour at most. The token is as good as its key, and never longer: it names the
key by what is stored of it, so one that was revoked takes its tokens along. A token is exchanged like a key, but its end stays where it is.

A login is such a token, too, for another audience: it lives for half a day and is renewed for a week, because somebody looks at it. Browsers add the
cookie that it is sent in by themselves, and show it to every server of this host, whatever its port. So it proves nothing without a word that was
told once, to the page that logged in, and of which it holds the hash.
"""

import hmac
import secrets
from typing import Any, Final, NamedTuple

from bloomery.services.access.auth import Auth, fingerprint
from bloomery.services.access.principal import Principal
from bloomery.services.access.tokens import MARK, Tokens
from bloomery.types.ids import now_us
from bloomery.types.keys import Key

LOGIN: Final = "login"
BROWSER: Final = "browser-with-word"
"""The audiences of tokens that stand for a key, and of logins."""
LIFETIME_S: Final = 3600
LOGIN_S: Final = 12 * 3600
LOGINS_S: Final = 7 * 24 * 3600
"""How long a login is renewed, from when the key was shown."""
_CSRF_BYTES: Final = 24
_ISSUER: Final = "passport-bloomery"
"""The tinker SDK reads the identity only from tokens whose issuer begins like this."""


class Owner(NamedTuple):
    """A key as the owner of things: keys of this server belong to projects and not to people."""

    urn: str
    organization: str
    email: str
    """Nobody's mailbox: the domain leads nowhere."""


class Login(NamedTuple):
    """A login just made or renewed: what the browser keeps, the key that it stands for, whether it was made over TLS, and when it ends."""

    token: str
    key: Key
    tls: bool
    ends_us: int


class NewLogin(NamedTuple):
    """A login just made, and the word that proves it, which is told now and never again."""

    login: Login
    csrf: str


class LoggedIn(NamedTuple):
    """Who a login says that calls, and the hash of the word that proves it."""

    principal: Principal
    csrf_hash: str

    def proved_by(self, csrf: str) -> bool:
        """Whether this is the word."""
        return hmac.compare_digest(fingerprint(csrf), self.csrf_hash)


class Identity:
    """Checks credentials and exchanges them."""

    def __init__(self, auth: Auth, tokens: Tokens) -> None:
        self._auth, self._tokens = auth, tokens

    async def check(self, credential: str | None) -> Principal:
        """The principal behind a key or a token."""
        if credential is None or not credential.startswith(MARK):
            return await self._auth.check(credential)
        return await self._auth.check_fingerprint(self._tokens.read(LOGIN, credential)["key"])

    async def exchange(self, credential: str) -> str:
        """A token for a key, or for another token."""
        key = await self._auth.mine(await self.check(credential))
        ends = [now_us() // 1_000_000 + LIFETIME_S]
        if key.expires_us is not None:
            ends.append(key.expires_us // 1_000_000)
        claims: dict[str, Any] = {"iss": _ISSUER}
        if credential.startswith(MARK):
            shown = self._tokens.read(LOGIN, credential)
            ends.append(shown["exp"])
            claims["key"] = shown["key"]
        else:
            claims["key"] = fingerprint(credential)
        owner = owner_of(key.project, key.name)
        return self._tokens.sign(LOGIN, claims | {"sub": owner.urn, "org_id": owner.organization, "email": owner.email}, expires_s=min(ends))

    async def log_in(self, key: str, *, tls: bool) -> NewLogin:
        """A login for a key; for a token, which has an end of its own, there is none."""
        p, csrf = await self._auth.check(key), secrets.token_urlsafe(_CSRF_BYTES)
        said = {"key": fingerprint(key), "csrf_hash": fingerprint(csrf), "tls": tls, "began": now_us() // 1_000_000}
        return NewLogin(await self._login(p, said), csrf)

    async def renew(self, token: str) -> Login:
        """The login of this token, which lives on, for a week at most. Its word stays, for other pages of the same browser know it."""
        said = self._tokens.read(BROWSER, token)
        return await self._login(await self._auth.check_fingerprint(said["key"]), said)

    async def logged_in(self, token: str) -> LoggedIn:
        """Who is behind the token of a login, while both it and its key are good."""
        said = self._tokens.read(BROWSER, token)
        return LoggedIn(await self._auth.check_fingerprint(said["key"]), said["csrf_hash"])

    async def _login(self, p: Principal, said: dict[str, Any]) -> Login:
        key = await self._auth.mine(p)
        ends = [now_us() // 1_000_000 + LOGIN_S, said["began"] + LOGINS_S]
        if key.expires_us is not None:
            ends.append(key.expires_us // 1_000_000)
        token = self._tokens.sign(BROWSER, said, expires_s=min(ends))
        return Login(token, key, said["tls"], min(ends) * 1_000_000)


def owner_of(project: str, key_name: str) -> Owner:
    """The owner as the tinker contract spells it; `model_owner` of a run is the same."""
    return Owner(user_urn(project), project, f"{key_name}@{project}.localhost")


def user_urn(project: str) -> str:
    """The owner of everything in a project."""
    return f"tml:organization_user:{project}"
