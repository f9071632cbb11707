"""Two honest neighbours for the table, refitted on exactly the rows that a version was trained on: the majority class and a bag of words."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bloomery.recipes.task import Question

MAX_LABELS = 100
"""A linear classifier has weights for each word and label; where every chat has an answer of its own they would not fit into memory."""
_WORD = re.compile(r"\w")


def majority(train: Sequence[Question], held_out: Sequence[Question]) -> list[bool]:
    """Whether the most frequent training label is right, per held-out row."""
    (label, _), *_ = Counter(row.label for row in train).most_common(1)
    return [row.label == label for row in held_out]


def bag_of_words(train: Sequence[Question], held_out: Sequence[Question]) -> list[bool]:
    """Whether a linear classifier over word and word-pair counts is right, per held-out row; of many labels, that of the most similar row."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    labels = [row.label for row in train]
    if len(set(labels)) < 2 or not any(_WORD.search(row.text) for row in train):
        return majority(train, held_out)
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b")
    known, asked = words.fit_transform([row.text for row in train]), words.transform([row.text for row in held_out])
    if len(set(labels)) <= min(MAX_LABELS, len(labels) // 2):
        predicted = LogisticRegression(C=30.0, max_iter=1000).fit(known, labels).predict(asked)
    else:
        predicted = [labels[row] for row in np.asarray((asked @ known.T).argmax(axis=1)).ravel()]
    return [str(label) == row.label for label, row in zip(predicted, held_out, strict=True)]
