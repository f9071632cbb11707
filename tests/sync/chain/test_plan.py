"""Every way is a way, and none is shorter; what it is found among is read at once."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.store.objects import Folder
from bloomery.sync.chain.manifest import Manifest, Step, key
from bloomery.sync.chain.objects import Ref
from bloomery.sync.chain.plan import AT_ONCE, Link, Move, read_versions, shortest
from bloomery.sync.chain.publisher import PublishConfig, Publisher
from bloomery.types.errors import Corrupt, Gone, NotFound
from bloomery.types.objects import Objects
from tests.sync.chain.models import RUN, version

sizes = st.integers(1, 50)


@st.composite
def chains(draw: st.DrawFn) -> dict[int, Link]:
    """Up to 20 versions, each with a delta or not, some merged ones, some bases."""
    found = {}
    base = 0
    for number in range(draw(st.integers(1, 20))):
        steps = []
        if number and draw(st.booleans() | st.just(True)):
            steps.append(step(number, "delta", number - 1, draw(sizes)))
        steps += [step(number, "merged", number - span, draw(sizes)) for span in (4, 16) if number >= span and draw(st.booleans())]
        if number == 0 or not steps or draw(st.integers(0, 5)) == 0:
            steps.append(step(number, "base", None, draw(sizes) * 10))
            base = number
        found[number] = Link(manifest(number, base, steps), str(number))
    return found


def step(number: int, kind: str, start: int | None, size: int) -> Step:
    return Step(kind=kind, start=start, object=Ref(blake3=f"{number:032x}{0 if start is None else start + 1:032x}", size=size))  # type: ignore[arg-type]


def manifest(number: int, base: int, steps: list[Step]) -> Manifest:
    return Manifest(
        run="run-1",
        epoch=1,
        sequence=number,
        parent="0" * 64 if number else None,
        base=base,
        old_root=None,
        new_root="0" * 32,
        layout="0" * 32,
        steps=tuple(steps),
    )


def cheapest(versions: dict[int, Link], at: int, have: int | None) -> float:
    """By trying everything."""
    if at == have:
        return 0
    costs = [
        each.object.size + (0 if each.start is None else cheapest(versions, each.start, have))
        for each in versions[at].manifest.steps
        if each.start is None or each.start in versions
    ]
    return min(costs, default=float("inf"))


@settings(max_examples=60, deadline=None)
@given(chains(), st.data())
def test_the_way_leads_there_and_no_other_is_cheaper(versions: dict[int, Link], data: st.DataObject) -> None:
    to = data.draw(st.sampled_from(sorted(versions)))
    have = data.draw(st.none() | st.integers(0, to))
    way = shortest(versions, to, have=have)
    assert sum(move.step.object.size for move in way) == cheapest(versions, to, have)
    at = have
    for place, move in enumerate(way):
        assert move.start == at or (place == 0 and move.start is None)
        assert move.step in versions[move.stop].manifest.steps
        at = move.stop
    assert at == to
    assert not way or way == [Move(*move) for move in way]


def test_where_no_way_leads_that_is_told() -> None:
    versions = {5: Link(manifest(5, 3, [step(5, "delta", 4, 1)]), "5")}
    with pytest.raises(Gone, match="no way leads to version 5: there is no base on it"):
        shortest(versions, 5, have=None)
    with pytest.raises(Gone, match="no way leads to version 5 from version 3"):
        shortest(versions, 5, have=3)
    assert [move.start for move in shortest(versions, 5, have=4)] == [4]
    with pytest.raises(Gone):
        shortest({0: Link(manifest(0, 0, [step(0, "base", None, 1)]), "0")}, 0, have=None, only_deltas=True)


class Gathering:
    """A store whose reads are answered when so many wait for one; everything is counted."""

    def __init__(self, inner: Objects, together: int) -> None:
        self.inner, self.name, self.keys = inner, inner.name, list[str]()
        self._together = threading.Barrier(together)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def get(self, key: str, *, at_most: int) -> tuple[bytes, str]:
        self.keys.append(key)
        self._together.wait(timeout=30)
        return self.inner.get(key, at_most=at_most)


def test_manifests_are_read_side_by_side_and_not_again(folder: Folder) -> None:
    count = 2 * AT_ONCE
    with Publisher.open(folder, RUN, holder="trainer", config=PublishConfig(merged=False, base_after_s=1e9, base_share=1e9)) as publisher:
        for number in range(count):
            publisher.publish(version(number - 1) if number else None, version(number))
    store = Gathering(folder, AT_ONCE)
    found = read_versions(store, RUN, ())
    assert list(found) == list(range(count))
    assert sorted(store.keys) == [key(number) for number in range(count)]
    assert read_versions(store, RUN, (), read=found) == found
    assert len(store.keys) == count


def test_of_manifests_that_are_refused_the_first_is_told(folder: Folder) -> None:
    with Publisher.open(folder, RUN, holder="trainer") as publisher:
        for number in range(5):
            publisher.publish(version(number - 1) if number else None, version(number))
    for number in (4, 2, 3):
        folder.put(key(number), b"{}")
    with pytest.raises(Corrupt, match=f"`{key(2)}` is no manifest"):
        read_versions(folder, RUN, ())


class Swept:
    """Versions up to one go when the first is read."""

    def __init__(self, inner: Objects, upto: int) -> None:
        self.inner, self.name, self._upto = inner, inner.name, upto

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def get(self, name: str, *, at_most: int) -> tuple[bytes, str]:
        for number in range(self._upto + 1):
            self.inner.delete(key(number))
        return self.inner.get(name, at_most=at_most)


@pytest.mark.parametrize("known", [False, True])
def test_what_a_sweep_removes_while_it_is_read_is_left_out(known: bool, folder: Folder) -> None:
    with Publisher.open(folder, RUN, holder="trainer") as publisher:
        for number in range(6):
            publisher.publish(version(number - 1) if number else None, version(number))
    before = {number: link for number, link in read_versions(folder, RUN, ()).items() if known and number < 2}
    assert list(read_versions(Swept(folder, 3), RUN, (), read=before)) == [4, 5]
    with pytest.raises(NotFound, match="were removed while they were read"):
        read_versions(Swept(folder, 5), RUN, ())
