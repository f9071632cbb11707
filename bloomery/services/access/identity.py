"""Who calls, by a key or by a token that stands for it.

A key is exchanged for a token that says whose it is and lives for an hour at most. The token is as good as its key, and never longer: it names the
key by what is stored of it, so one that was revoked takes its tokens along. A token is exchanged like a key, but its end stays where it is.
"""

from typing import Any, Final, NamedTuple

from bloomery.services.access.auth import Auth, fingerprint
from bloomery.services.access.principal import Principal
from bloomery.services.access.tokens import MARK, Tokens
from bloomery.types.ids import now_us

LOGIN: Final = "login"
LIFETIME_S: Final = 3600
_ISSUER: Final = "passport-bloomery"
"""The tinker SDK reads the identity only from tokens whose issuer begins like this."""


class Owner(NamedTuple):
    """A key as the owner of things: keys of this server belong to projects and not to people."""

    urn: str
    organization: str
    email: str
    """Nobody's mailbox: the domain leads nowhere."""


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


def owner_of(project: str, key_name: str) -> Owner:
    """The owner as the tinker contract spells it; `model_owner` of a run is the same."""
    return Owner(user_urn(project), project, f"{key_name}@{project}.localhost")


def user_urn(project: str) -> str:
    """The owner of everything in a project."""
    return f"tml:organization_user:{project}"
