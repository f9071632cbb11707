"""Near-duplicates: what counts as one, and that the fast search finds what the slow one finds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.services.data.shingles import SIMILAR, NearDuplicates, jaccard, shingles_of

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


@settings(max_examples=60, deadline=None)
@given(members=st.lists(words, max_size=8), text=words)
def test_the_search_agrees_with_comparing_all_pairs(members: list[str], text: str) -> None:
    near = NearDuplicates()
    for member in members:
        near.add(member)
    best = max((jaccard(shingles_of(member), shingles_of(text)) for member in members), default=0.0)
    if best >= 0.95:  # at the threshold itself the bands may miss a pair, two in ten thousand times
        assert near.has(text)
    if best < SIMILAR:
        assert not near.has(text)
