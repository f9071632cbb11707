"""The classifiers beside the model, on the data that users bring."""

from bloomery.recipes.neighbours import MAX_LABELS, bag_of_words
from bloomery.recipes.task import Question


def rows(*pairs: tuple[str, str]) -> list[Question]:
    return [Question((), label, text, label) for text, label in pairs]


def test_words_decide_between_few_labels_and_between_many() -> None:
    few = rows(("the cat sleeps", "cat"), ("a cat eats", "cat"), ("the dog barks", "dog"), ("a dog runs", "dog"))
    many = rows(*((f"question number{number} here", f"answer {number}") for number in range(MAX_LABELS + 1)))
    assert bag_of_words(few, rows(("a dog", "dog"), ("a cat", "dog"))) == [True, False]
    assert bag_of_words(many, rows(("number7", "answer 7"), ("number8", "answer 7"))) == [True, False]


def test_texts_without_words_leave_the_majority() -> None:
    assert bag_of_words(rows(("!", "a"), ("!!", "a"), ("?", "b")), rows(("?", "b"), ("!", "a"))) == [False, True]
