"""Who may write to a chain: one at a time, whose number rises with every change of hands.

The lease is an object that its holder replaces again and again, under the condition that it is still the one that he wrote. Whoever wants it watches:
an object that did not change for a whole term, by the watcher's own clock, is of somebody who is gone, and is replaced by one with the next epoch.
No two clocks are compared. The holder who was only slow finds another's object when he renews his own, which he does before every commit, and stops.
Between his last look and his commit somebody may still take over; then the number of the version decides, which only one of them can create.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from bloomery.obs.failpoints import failpoint
from bloomery.types.errors import BloomeryError, Conflict, Corrupt, NotFound, Unavailable
from bloomery.types.ids import new_id
from bloomery.types.objects import Objects
from bloomery.types.wire import Wire

KEY: Final = "lease"
TERM_S: Final = 60.0
_MAX_BYTES: Final = 1 << 12
_LOOKS: Final = 20
"""In a term."""
_LOST_LOOKS: Final = 200
"""In a term, where the lease was free and somebody else got it."""


class _Holding(Wire, frozen=True, kw_only=True):
    run: str
    epoch: int
    holder: str
    life: str
    """Another one each time it changes hands, so that two lives of one holder are two."""
    beat: int
    released: bool = False


class Lease:
    """One's own hold on a chain."""

    def __init__(self, objects: Objects, holding: _Holding, tag: str, term_s: float) -> None:
        """`take` makes them."""
        self._objects, self._holding, self._tag, self._term_s = objects, holding, tag, term_s
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._lost = False

    @property
    def epoch(self) -> int:
        """Greater than that of any holder before."""
        return self._holding.epoch

    @property
    def run(self) -> str:
        """Whose chain it is."""
        return self._holding.run

    def renew(self) -> None:
        """Show that the holder lives. Conflict if somebody else has taken the lease, now and ever after."""
        with self._lock:
            self._replace(released=False)

    def release(self) -> None:
        """Let the next one have it without waiting; whoever lost it has nothing to release."""
        with self._turn, self._lock, suppress(Conflict):
            # A renewal whose answer was lost is found when it is asked for again; to release what was before it would be refused.
            self._replace(released=False)
            self._replace(released=True)
            self._lost = True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For threads that use one lease: who commits a version, or removes a key, does so while no other does. Conflict once the lease was lost."""
        with self._turn:
            if self._lost:
                raise self._gone()
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it meanwhile from a thread, for steps that take longer than a term."""
        over = threading.Event()
        thread = threading.Thread(target=self._keep, args=(over,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _keep(self, over: threading.Event) -> None:
        while not over.wait(self._term_s / 3):
            try:
                self.renew()
            except Conflict:
                return
            except BloomeryError:
                # The store is away: the next try, or the commit, finds out what became of the lease.
                continue

    def _replace(self, *, released: bool) -> None:
        following = msgspec.structs.replace(self._holding, beat=self._holding.beat + 1, released=released)
        tag = None if self._lost else self._objects.replace(KEY, msgspec.json.encode(following), self._tag)
        if tag is None:
            self._lost = True
            raise self._gone()
        self._holding, self._tag = following, tag

    def _gone(self) -> Conflict:
        return Conflict(
            f"{self._objects.name}: `{self._holding.holder}` has lost the lease of run `{self.run}`, epoch {self.epoch}: open the chain anew"
        )


def take(
    objects: Objects,
    run: str,
    holder: str,
    *,
    above: int = 0,
    term_s: float = TERM_S,
    patience_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Become the writer of a chain, with an epoch greater than `above` and than that of any holder.

    A lease that was released, or that is of a former life of `holder`, is taken at once; another one when it did not change for `term_s`. Unavailable
    if it still changes after `patience_s`, Conflict if the store holds the chain of another run.
    """
    patience_s = 3 * term_s if patience_s is None else patience_s
    began = seen_since = clock()
    seen: str | None = None
    while True:
        holding, tag = _read(objects)
        if holding is not None and holding.run != run:
            raise Conflict(f"{objects.name} holds the chain of run `{holding.run}`, not of `{run}`: use another folder or prefix")
        if tag != seen:
            seen, seen_since = tag, clock()
        free = holding is None or holding.released or holding.holder == holder or clock() - seen_since >= term_s
        if free and (lease := _try(objects, run, holder, holding, tag, above, term_s)) is not None:
            return lease
        if clock() - began > patience_s:
            raise Unavailable(f"{objects.name}: `{holding.holder if holding else 'somebody'}` keeps the lease of run `{run}`: stop that writer first")
        # Somebody was faster, who is seen at once; or the store refuses everybody, and is not to be asked without end.
        pause(term_s / (_LOST_LOOKS if free else _LOOKS))


def _read(objects: Objects) -> tuple[_Holding | None, str]:
    try:
        data, tag = objects.get(KEY, at_most=_MAX_BYTES)
    except NotFound:
        return None, ""
    try:
        return msgspec.json.decode(data, type=_Holding), tag
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"{objects.name}: `{KEY}` is no lease: {error}; remove it if nobody writes") from error


def _try(objects: Objects, run: str, holder: str, before: _Holding | None, tag: str, above: int, term_s: float) -> Lease | None:
    epoch = max(above, before.epoch if before else 0) + 1
    holding = _Holding(run=run, epoch=epoch, holder=holder, life=new_id("life"), beat=0)
    data = msgspec.json.encode(holding)
    failpoint("chain.lease.taking")
    own = objects.create(KEY, data) if before is None else objects.replace(KEY, data, tag)
    failpoint("chain.lease.taken")
    return None if own is None else Lease(objects, holding, own, term_s)
