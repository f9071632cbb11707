"""A user's own rows, before anything is trained on them."""

import pytest

from bloomery.models import tiny
from bloomery.recipes.demo_rows import check_fit
from bloomery.recipes.loop import Rows
from bloomery.recipes.task import routing_task
from bloomery.render import ChatTokenizer
from bloomery.types.errors import InvalidInput


def test_a_row_that_leaves_no_room_to_answer_is_named() -> None:
    tokenizer, task = ChatTokenizer.load(tiny.PATH), routing_task(["a"])
    short, long = task.ask("short", "a"), task.ask("Long story. " * 100, "a")
    check_fit(Rows([short], [short], [short]), tokenizer, 100)
    with pytest.raises(InvalidInput, match="begins 'Long story"):
        check_fit(Rows([short], [long], [short]), tokenizer, 100)
