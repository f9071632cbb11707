"""What each key may use per minute: requests that ask a model for an answer, and tokens of prompts and answers, whichever contract they came by.

Both are buckets that hold a minute's worth at most and fill evenly. A request takes one of the first when it arrives and its prompt of the second
before it is sampled; what it sampled is taken when it ends, and may leave the key in debt, which later requests wait for. So nobody has to guess how
long an answer will be, and a key exceeds its tokens by what it has in hand at most. A prompt of which nothing came is given back. The buckets live in
memory: a new start of the server fills them.
"""

import math
import time
from collections.abc import Callable
from typing import Final, Literal

from bloomery.services.access.principal import Principal
from bloomery.types.errors import InvalidInput, RateLimited

Resource = Literal["requests", "tokens"]

MINUTE_S: Final = 60.0
_MANY: Final = 1024
"""So many buckets are looked through for full ones, which say nothing."""


class RateLimits:
    """The buckets of all keys that have limits. `refused` hears of what was turned away, `clock` gives seconds."""

    def __init__(self, refused: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._refused, self._clock = refused, clock
        self._buckets: dict[tuple[str, Resource], _Bucket] = {}

    def request(self, p: Principal) -> None:
        """Take a request."""
        self._take(p, "requests", p.allowance.requests, 1)

    def prompt(self, p: Principal, tokens: int, *, field: str) -> None:
        """Take the tokens of a prompt, which the caller knows as `field`. One that is longer than a minute's worth is InvalidInput: no wait helps."""
        limit = p.allowance.tokens
        if limit is not None and tokens > limit:
            problem = f"`{field}` has {tokens} tokens, and this key may use {limit} per minute"
            raise InvalidInput(f"{problem}: shorten it, or use a key with a higher limit", field=field)
        self._take(p, "tokens", limit, tokens)

    def rollout(self, p: Principal, tokens: int, *, field: str) -> None:
        """Take a request together with the tokens of its prompt, or neither: whoever is told to wait by himself comes again and again."""
        self.request(p)
        try:
            self.prompt(p, tokens, field=field)
        except (InvalidInput, RateLimited):
            self._put(p, "requests", p.allowance.requests, 1)
            raise

    def give_back(self, p: Principal, tokens: int) -> None:
        """Tokens of a prompt that was taken, and of which nothing came."""
        self._put(p, "tokens", p.allowance.tokens, tokens)

    def sampled(self, p: Principal, tokens: int) -> None:
        """Take tokens that were sampled, whether they are there or not."""
        if p.allowance.tokens is not None:
            now_s = self._clock()
            self._bucket(p, "tokens", p.allowance.tokens, now_s).take(tokens, now_s)

    def headers(self, p: Principal) -> dict[str, str]:
        """Where the key stands, as OpenAI says it; nothing for what has no limit."""
        told: dict[str, str] = {}
        now_s = self._clock()
        for resource, limit in self._limits(p):
            bucket = self._bucket(p, resource, limit, now_s)
            told[f"x-ratelimit-limit-{resource}"] = str(limit)
            told[f"x-ratelimit-remaining-{resource}"] = str(max(0, math.floor(bucket.level(now_s))))
            told[f"x-ratelimit-reset-{resource}"] = duration(bucket.until_s(limit, now_s))
        return told

    def _take(self, p: Principal, resource: Resource, limit: int | None, amount: int) -> None:
        if limit is None:
            return
        now_s = self._clock()
        bucket = self._bucket(p, resource, limit, now_s)
        if bucket.level(now_s) >= amount:
            bucket.take(amount, now_s)
            return
        self._refused(resource)
        wait_s = bucket.until_s(amount, now_s)
        asked = "" if resource == "requests" else f" and this prompt takes {amount}"
        raise RateLimited(
            f"this key may use {limit} {resource} per minute{asked}: try again in {duration(wait_s)}", resource=resource, retry_after_s=wait_s
        )

    def _put(self, p: Principal, resource: Resource, limit: int | None, amount: int) -> None:
        if limit is not None:
            now_s = self._clock()
            self._bucket(p, resource, limit, now_s).put(amount, now_s)

    def _limits(self, p: Principal) -> list[tuple[Resource, int]]:
        both: tuple[tuple[Resource, int | None], ...] = (("requests", p.allowance.requests), ("tokens", p.allowance.tokens))
        return [(resource, limit) for resource, limit in both if limit is not None]

    def _bucket(self, p: Principal, resource: Resource, limit: int, now_s: float) -> "_Bucket":
        if (p.key_id, resource) not in self._buckets:
            if len(self._buckets) >= _MANY:
                self._forget_full(now_s)
            self._buckets[p.key_id, resource] = _Bucket(limit, now_s)
        return self._buckets[p.key_id, resource]

    def _forget_full(self, now_s: float) -> None:
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.full(now_s)}


class _Bucket:
    """Fills evenly, up to a minute's worth."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute, self._level, self._at_s = per_minute, float(per_minute), now_s

    def level(self, now_s: float) -> float:
        """What is in it; below 0 is debt."""
        return min(float(self._per_minute), self._level + (now_s - self._at_s) * self._per_minute / MINUTE_S)

    def full(self, now_s: float) -> bool:
        """Whether it is as a new one."""
        return self.level(now_s) == self._per_minute

    def take(self, amount: int, now_s: float) -> None:
        """Take it out, into debt if need be."""
        self._level, self._at_s = self.level(now_s) - amount, now_s

    def put(self, amount: int, now_s: float) -> None:
        """Put it back; what does not fit is lost."""
        self.take(-amount, now_s)

    def until_s(self, amount: int, now_s: float) -> float:
        """Seconds until it holds as much."""
        return max(0.0, (amount - self.level(now_s)) * MINUTE_S / self._per_minute)


def duration(seconds: float) -> str:
    """A time as OpenAI's headers write it: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < MINUTE_S:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
