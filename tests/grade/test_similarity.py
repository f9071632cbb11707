"""Closed forms, and what the published implementations (sacrebleu 2.6, nltk 3.10, rouge-score 0.1.2, rapidfuzz 3.14) gave for the same texts."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.grade.similarity import MAX_CHARS, MAX_FUZZY_CHARS, Metric, TooLong, cosine, similarity

METRICS: list[Metric] = [metric for metric in get_args(Metric) if metric != "cosine"]
WORDS = st.lists(st.sampled_from(["the", "cat", "cats", "sat", "on", "Mat", ".", "3"]), max_size=12).map(" ".join)
TEXT = "the cat sat on the mat"


@pytest.mark.parametrize("metric", METRICS)
def test_equal_texts_are_alike_and_strangers_are_not(metric: Metric) -> None:
    # METEOR takes a little off even for one chunk in order.
    assert similarity(metric, TEXT, TEXT) == pytest.approx(1 - 0.5 / 6**3 if metric == "meteor" else 1.0)
    assert similarity(metric, "zzz", "qqq") == 0.0
    assert similarity(metric, "", "something") == 0.0


@pytest.mark.parametrize(
    ("metric", "text", "reference", "expected"),
    [
        ("rouge_1", "the cat sat", "the cat ran home", 2 * 2 / 7),
        ("rouge_2", "the cat sat", "the cat ran home", 2 * 1 / 5),
        ("rouge_3", "a b c d", "a b c e", 2 * 1 / 4),
        ("rouge_4", "a b c d e", "a b c d f", 2 * 1 / 4),
        ("rouge_5", "a b c d e f", "a b c d e", 2 * 1 / 3),
        ("rouge_l", "a x b y c", "a b c", 2 * 3 / 8),
        ("rouge_l", "c b a", "a b c", 2 * 1 / 6),
        ("rouge_1", "Cat, cat!", "CAT cat", 1.0),
        ("gleu", "the cat", "the cat sat", 3 / 6),
        ("gleu", "the the the", "the", 1 / 6),
        ("bleu", "the cat", "the cat sat on the mat", math.exp(1 - 6 / 2)),
        ("bleu", "the dog sat on the mat", "the cat sat on the mat", (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        ("meteor", "sat cat the", "the cat sat", 1 - 0.5),
        ("meteor", "running cats", "run cat", 1 - 0.5 / 2**3),
        ("fuzzy_match", "New York", "new york!", 1.0),
    ],
)
def test_metrics_have_their_closed_forms(metric: Metric, text: str, reference: str, expected: float) -> None:
    assert similarity(metric, text, reference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("bleu", 0.07817610446892725),
        ("gleu", 0.13043478260869565),
        ("meteor", 0.45074722802506817),
        ("rouge_1", 1 / 3),
        ("rouge_2", 0.125),
        ("rouge_l", 1 / 3),
        ("fuzzy_match", 0.774757281553398),
    ],
)
def test_the_published_implementations_agree(metric: Metric, expected: float) -> None:
    text, reference = "He happily generously runs, nationally 3 dogs ran .", "The happy dog runs generous , nationality ; 3 dogs run home ."
    assert similarity(metric, text, reference) == pytest.approx(expected, rel=1e-9)


@given(WORDS, WORDS, st.sampled_from(METRICS))
def test_every_metric_is_between_0_and_1(text: str, reference: str, metric: Metric) -> None:
    assert 0.0 <= similarity(metric, text, reference) <= 1.0


@given(WORDS, WORDS, st.sampled_from(["rouge_1", "rouge_2", "rouge_l", "gleu"]))
def test_these_do_not_care_which_text_is_the_reference(text: str, reference: str, metric: Metric) -> None:
    assert similarity(metric, text, reference) == pytest.approx(similarity(metric, reference, text))


@pytest.mark.parametrize("metric", METRICS)
def test_texts_that_take_seconds_are_not_compared(metric: Metric) -> None:
    most = MAX_FUZZY_CHARS if metric == "fuzzy_match" else MAX_CHARS
    with pytest.raises(TooLong, match=str(most)):
        similarity(metric, "a" * (most + 1), "a")


def test_cosine_is_that_of_the_angle() -> None:
    assert cosine([1, 0], [1, 1]) == pytest.approx(math.sqrt(0.5))
    assert cosine([2, 0], [-3, 0]) == -1.0
    with pytest.raises(ValueError, match="zeros"):
        cosine([0, 0], [1, 0])
