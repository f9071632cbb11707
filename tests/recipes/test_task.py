"""Questions and how answers are read."""

from bloomery.recipes.demo_rows import split
from bloomery.recipes.task import Task, routing_task

TASK = routing_task(["asyncio", "email"])


def test_a_labelled_text_becomes_a_chat_with_a_json_answer() -> None:
    question = TASK.ask("Wait for it.", "asyncio")
    assert [message["role"] for message in question.messages] == ["system", "user", "assistant"]
    assert TASK.read(question.answer) == "asyncio"
    assert TASK.question_of(question.messages) == question


def test_only_one_known_label_in_a_json_object_is_valid() -> None:
    invalid = ["asyncio", "", '{"package": "turtle"}', '{"package": "email"', '["email"]', '{"package": ["email"]}', '{"package": "email", "x": 1}']
    assert [TASK.read(content) for content in invalid] == [None] * len(invalid)


def test_free_chat_is_right_word_for_word() -> None:
    chat = Task(None, "", frozenset())
    assert chat.read(" yes \n") == "yes"
    assert chat.read("  ") is None


def test_equal_texts_stay_in_one_part() -> None:
    questions = [TASK.ask(f"text {number % 40}", "email") for number in range(400)]
    parts = split(questions)
    texts = [{question.text for question in part} for part in parts]
    assert sum(map(len, parts)) == 400
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]
    assert not texts[1] & texts[2]
