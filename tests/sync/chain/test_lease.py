"""One writer at a time, by what the store says and the watcher's own clock."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bloomery.store.objects import Folder
from bloomery.sync.chain import lease as leases
from bloomery.sync.chain.lease import take
from bloomery.types.errors import Conflict, Corrupt, Unavailable
from bloomery.types.objects import Objects
from tests.sync.chain.faults import Broken

RUN = "run-1"


class Clock:
    """Goes on by what is waited; `meanwhile` happens in each pause."""

    def __init__(self, meanwhile: object = None) -> None:
        self.now_s = 0.0
        self.meanwhile = meanwhile

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        if callable(self.meanwhile):
            self.meanwhile()


def test_epochs_rise_with_every_change_of_hands(objects: Objects) -> None:
    first = take(objects, RUN, "a")
    assert first.epoch == 1
    first.renew()
    first.release()
    clock = Clock()
    second = take(objects, RUN, "b", clock=clock, pause=clock.pause)
    assert (second.epoch, clock.now_s) == (2, 0)
    second.release()
    assert take(objects, RUN, "c", above=7).epoch == 8


def test_a_lease_that_nobody_renews_is_taken_after_a_term_and_its_holder_notices(objects: Objects) -> None:
    first = take(objects, RUN, "a")
    clock = Clock()
    second = take(objects, RUN, "b", term_s=10, clock=clock, pause=clock.pause)
    assert second.epoch == 2
    assert 10 <= clock.now_s <= 11
    for _ in range(2):
        with pytest.raises(Conflict, match="`a` has lost the lease of run `run-1`, epoch 1"):
            first.renew()
    first.release()
    second.renew()


def test_a_lease_that_is_renewed_is_not_taken(folder: Folder) -> None:
    first = take(folder, RUN, "a")
    clock = Clock(first.renew)
    with pytest.raises(Unavailable, match="`a` keeps the lease of run `run-1`"):
        take(folder, RUN, "b", term_s=10, patience_s=100, clock=clock, pause=clock.pause)
    assert clock.now_s > 100
    first.renew()


def test_a_former_life_gives_way_at_once(folder: Folder) -> None:
    first, clock = take(folder, RUN, "a"), Clock()
    second = take(folder, RUN, "a", clock=clock, pause=clock.pause)
    assert (second.epoch, clock.now_s) == (2, 0)
    with pytest.raises(Conflict, match="lost the lease"):
        first.renew()


def test_of_many_who_want_it_at_once_every_one_has_an_epoch_of_his_own(objects: Objects) -> None:
    """Each as a new life of one holder, so all take it from each other."""
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda _: take(objects, RUN, "a"), range(6)))
    assert sorted(lease.epoch for lease in taken) == [1, 2, 3, 4, 5, 6]
    holds = []
    for lease in taken:
        try:
            lease.renew()
            holds.append(lease.epoch)
        except Conflict:
            continue
    assert holds == [6]


class Refusing:
    """A store that refuses the next conditional writes."""

    def __init__(self, inner: Objects, refusals: int) -> None:
        self.inner, self.name, self.refusals = inner, inner.name, refusals

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> str | None:
        self.refusals -= 1
        return None if self.refusals >= 0 else self.inner.create(key, data)


def test_whoever_lost_a_race_for_a_free_lease_waits_before_the_next_one(folder: Folder) -> None:
    clock = Clock()
    assert take(Refusing(folder, 5), RUN, "a", term_s=10, clock=clock, pause=clock.pause).epoch == 1
    assert clock.now_s == pytest.approx(5 * 10 / 200)


def test_a_store_of_another_run_is_refused(folder: Folder) -> None:
    take(folder, RUN, "a").release()
    with pytest.raises(Conflict, match="holds the chain of run `run-1`, not of `run-2`"):
        take(folder, "run-2", "a")


def test_what_is_no_lease_is_told(folder: Folder) -> None:
    folder.put(leases.KEY, b"{}")
    with pytest.raises(Corrupt, match="`lease` is no lease"):
        take(folder, RUN, "a")


def test_a_renewal_whose_answer_was_lost_is_no_loss_of_the_lease(objects: Objects) -> None:
    broken = Broken(objects)
    lease = take(broken, RUN, "a")
    broken.lost = 2
    for _ in range(2):
        with pytest.raises(Unavailable):
            lease.renew()
    lease.renew()
    lease.renew()


def test_whoever_lost_it_unnoticed_has_nothing_to_release(objects: Objects) -> None:
    first, second = take(objects, RUN, "a"), take(objects, RUN, "a")
    first.release()
    second.renew()


def test_a_lease_is_released_after_a_renewal_whose_answer_was_lost(objects: Objects) -> None:
    broken, clock = Broken(objects), Clock()
    lease = take(broken, RUN, "a")
    broken.lost = 1
    with pytest.raises(Unavailable):
        lease.renew()
    lease.release()
    assert (take(objects, RUN, "b", clock=clock, pause=clock.pause).epoch, clock.now_s) == (2, 0)


def test_a_lease_is_kept_by_a_thread_through_failures_until_the_block_ends(folder: Folder) -> None:
    broken = Broken(folder)
    lease = take(broken, RUN, "a", term_s=0.03)
    broken.lost = 1
    with lease.kept():
        beats = [folder.get(leases.KEY, at_most=1000)[1]]
        seen = threading.Event()

        def watch() -> None:
            while len(beats) < 4:
                tag = folder.get(leases.KEY, at_most=1000)[1]
                if tag != beats[-1]:
                    beats.append(tag)
            seen.set()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        assert seen.wait(60)
    assert not [each for each in threading.enumerate() if each.name == "lease"]
    take(folder, RUN, "a")
    with pytest.raises(Conflict, match="lost the lease"):
        lease.renew()
