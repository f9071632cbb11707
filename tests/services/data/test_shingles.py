"""Near-duplicates: what counts as one, and that the fast search finds what the slow one finds."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.services.data import shingles
from bloomery.services.data.shingles import CROWD, SIMILAR, NearDuplicates, jaccard, shingles_of

TEXT = "Return the arc tangent of x in radians. The result is between minus half pi and half pi. Unlike its cousin it takes one argument."
words = st.lists(st.sampled_from(["open", "file", "path", "read", "return", "list", "string", "of", "the"]), min_size=1, max_size=12).map(" ".join)


def test_case_spacing_and_punctuation_do_not_make_a_text_another() -> None:
    near = NearDuplicates()
    near.add(TEXT)
    assert near.has(TEXT.upper().replace(" ", "\n  ").replace(".", "!"))


def test_one_changed_word_in_a_long_text_is_a_near_duplicate() -> None:
    near = NearDuplicates()
    near.add(TEXT)
    assert near.has(TEXT.replace("result", "value"))


def test_another_text_is_none() -> None:
    near = NearDuplicates()
    near.add(TEXT)
    assert not near.has("Return a list of the names of the entries in the directory given by path.")


def test_texts_without_letters_can_be_asked_for() -> None:
    near = NearDuplicates()
    assert not near.has("?!")
    near.add("?!")
    assert near.has("...")


@settings(max_examples=120, deadline=None)
@given(members=st.lists(words, max_size=8), text=words, crowd=st.sampled_from([1, CROWD]))
def test_the_search_agrees_with_comparing_all_pairs(members: list[str], text: str, crowd: int) -> None:
    near = NearDuplicates(crowd)
    for member in members:
        near.add(member)
    best = max((jaccard(shingles_of(member), shingles_of(text)) for member in members), default=0.0)
    if best >= 0.95:  # at the threshold itself the bands may miss a pair, two in ten thousand times
        assert near.has(text)
    if best < SIMILAR:
        assert not near.has(text)


TEMPLATE = (
    "You are an assistant of the support desk. Read the ticket below, decide which team is to have it, and answer with the name of that team alone. "
    "Tickets may be written in any language; the answer is always in English. The ticket of the customer reads as follows: "
)


def of_a_template(vocabulary: int, count: int, said: int = 14) -> list[list[str]]:
    """The words behind it, which make its texts no near-duplicates of one another."""
    random = Random(vocabulary)
    known = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(3, 9))) for _ in range(vocabulary)]
    return [random.choices(known, k=said) for _ in range(count)]


def text_of(said: list[str]) -> str:
    return TEMPLATE + " ".join(said)


@pytest.mark.parametrize("at_once", [{}, {"_FEW": 0, "_PLACES_AT_ONCE": 100}], ids=["at once", "in parts"])
@pytest.mark.parametrize("vocabulary", [24, 40, 2000])
def test_in_a_crowd_of_one_template_is_found_what_comparing_all_pairs_finds(
    vocabulary: int, at_once: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in at_once.items():
        monkeypatch.setattr(shingles, name, count)
    given = of_a_template(vocabulary, 500)
    members, others = given[:400], given[400:]
    # Ends that are another member's: the more of a text is, the less it is like its member.
    changed = [member[: 14 - place % 8] + other[14 - place % 8 :] for place, (member, other) in enumerate(pairwise(members[:101]))]
    near = NearDuplicates()
    for member in members:
        near.add(text_of(member))
    known = [shingles_of(text_of(member)) for member in members]
    found = []
    for text in map(text_of, (*others, *changed)):
        asked = shingles_of(text)
        best = max(jaccard(each, asked) for each in known)
        found.append(best >= SIMILAR)
        assert near.has(text) == found[-1], (best, text)
    assert 10 < sum(found) < 190


def test_texts_that_are_added_between_two_questions_are_found_in_a_crowd_too() -> None:
    near = NearDuplicates(crowd=4)
    for said in of_a_template(2000, 60):
        assert not near.has(text_of(said))
        near.add(text_of(said))
        assert near.has(text_of([*said[:-1], "another"]))


def test_however_large_a_crowd_is_few_of_its_texts_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counting(jaccard)
    monkeypatch.setattr(shingles, "jaccard", counted)
    near = NearDuplicates()
    texts = [*map(text_of, of_a_template(2000, 2100))]
    for text in texts[:2000]:
        near.add(text)
    assert not any(map(near.has, texts[2000:]))
    # Of each of 16 bands so many as are no crowd.
    assert counted.calls < 100 * 16 * CROWD


class Counting:
    """A function, and how often it was asked."""

    def __init__(self, function: Callable[..., float]) -> None:
        self._function, self.calls = function, 0

    def __call__(self, *given: object) -> float:
        self.calls += 1
        return self._function(*given)
