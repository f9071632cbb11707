"""Two honest neighbours for the table, refitted on exactly the rows that a version was trained on: the majority class and a bag of words."""

from collections import Counter
from collections.abc import Sequence

from bloomery.recipes.task import Question


def majority(train: Sequence[Question], held_out: Sequence[Question]) -> list[bool]:
    """Whether the most frequent training label is right, per held-out row."""
    (label, _), *_ = Counter(row.label for row in train).most_common(1)
    return [row.label == label for row in held_out]


def bag_of_words(train: Sequence[Question], held_out: Sequence[Question]) -> list[bool]:
    """Whether a linear classifier over word and word-pair counts is right, per held-out row."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    if len({row.label for row in train}) < 2:
        return majority(train, held_out)
    classifier = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b"), LogisticRegression(C=30.0, max_iter=1000)
    )
    classifier.fit([row.text for row in train], [row.label for row in train])
    predicted = classifier.predict([row.text for row in held_out])
    return [str(label) == row.label for label, row in zip(predicted, held_out, strict=True)]
