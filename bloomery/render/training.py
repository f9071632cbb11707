"""Which tokens of a conversation the loss sees: what the assistant says, and the token with which it stops.

Templates do not say which of their output belongs to whom, so it is found by rendering: what comes after the prompt that asks for an answer, up to
the end of the conversation cut behind that answer. That is right only where both are beginnings of the whole; where they are not (a template that
rewrites earlier turns), there is an error instead of a guess.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bloomery.render.control import ControlTokens
from bloomery.types.errors import InvalidInput

Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A conversation for training; the weight of a token is that of predicting it."""

    tokens: list[int]
    weights: list[float]


def render_training(messages: Messages, text_of: Callable[[Messages, bool], str], control: ControlTokens, ends: Collection[int]) -> Rendered:
    """Tokens and loss weights; `text_of` renders messages, the flag asks for the prompt of an answer."""
    whole = text_of(messages, False)
    tokens, starts = control.encode(whole)
    weights = [0.0] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        first, end = _answer_of(messages, index, whole, text_of, control)
        answer = [place for place, start in enumerate(starts) if first <= start < end]
        last_end = max((place for place in answer if tokens[place] in ends), default=len(tokens))
        for place in answer:
            weights[place] = float(place <= last_end)
    if not any(weights):
        raise InvalidInput("there is nothing to learn: no message of the role `assistant` has content", field="messages")
    return Rendered(tokens, weights)


def _answer_of(messages: Messages, index: int, whole: str, text_of: Callable[[Messages, bool], str], control: ControlTokens) -> tuple[int, int]:
    """Where the answer `messages[index]` begins and ends in the unmasked text."""
    if index == 0:
        raise InvalidInput("the first message is the assistant's: there is nothing before it to answer", field="messages.0.role")
    before, after = text_of(messages[:index], True), text_of(messages[: index + 1], False)
    if not (after.startswith(before) and whole.startswith(after)):
        raise InvalidInput(
            f"the chat template writes message {index} differently when more messages follow, so its tokens cannot be told apart: "
            "make one row of each answer, with the answer as its last message",
            field=f"messages.{index}",
        )
    return len(control.unmask(before)), len(control.unmask(after))
