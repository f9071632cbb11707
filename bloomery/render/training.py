"""Which tokens of a conversation the loss sees: what the assistant says, and the token with which it stops.

Templates do not say which of their output belongs to whom, so it is found by rendering: what comes after the prompt that asks for an answer, up to
the end of the conversation cut behind that answer. That is right only where both are beginnings of the whole; where they are not (a template that
rewrites earlier turns), there is an error instead of a guess, or one example of each answer as its model was asked for it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from bloomery.render.control import ControlTokens
from bloomery.types.errors import InvalidInput

Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A conversation for training; the weight of a token is that of predicting it."""

    tokens: list[int]
    weights: list[float]

    def cut(self, context: int) -> Self:
        """As much of it as a context holds, from its beginning."""
        return self._replace(tokens=self.tokens[:context], weights=self.weights[:context])

    def times(self, weight: float) -> Self:
        """The same with all weights multiplied."""
        return self if weight == 1 else self._replace(weights=[weight * each for each in self.weights])

    @property
    def trained(self) -> int:
        """Tokens that carry loss; nothing predicts the first."""
        return sum(weight != 0 for weight in self.weights[1:])


class Template(NamedTuple):
    """What writes messages, and what their text is made of."""

    text_of: Callable[[Messages, bool], str]
    """Renders messages; the flag asks for the prompt of an answer."""
    control: ControlTokens
    ends: Collection[int]
    """Tokens that end an answer."""


class Rewritten(InvalidInput):
    """The template writes a message otherwise when others follow it."""


def render_training(messages: Messages, weights: Sequence[float], template: Template) -> Rendered:
    """Tokens and loss weights; `weights` says how much each message counts, of which only those of the assistant can."""
    whole = template.text_of(messages, False)
    tokens, starts = template.control.encode(whole)
    loss = [0.0] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not weights[index]:
            continue
        first, end = _answer_of(messages, index, whole, template)
        answer = [place for place, start in enumerate(starts) if first <= start < end]
        last_end = max((place for place in answer if tokens[place] in template.ends), default=len(tokens))
        for place in answer:
            loss[place] = weights[index] * (place <= last_end)
    if not any(loss):
        raise InvalidInput("there is nothing to learn: no message of the role `assistant` has content and a `weight` but 0", field="messages")
    return Rendered(tokens, loss)


def render_examples(messages: Messages, weights: Sequence[float], template: Template) -> list[Rendered]:
    """One example of the whole; of a template that rewrites earlier turns one of each answer, with what was before it as it was then."""
    try:
        return [render_training(messages, weights, template)]
    except Rewritten:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant" and weights[index]]
        return [render_training(messages[: index + 1], [0.0] * index + [weights[index]], template) for index in answers]


def _answer_of(messages: Messages, index: int, whole: str, template: Template) -> tuple[int, int]:
    """Where the answer `messages[index]` begins and ends in the unmasked text."""
    if index == 0:
        raise InvalidInput("the first message is the assistant's: there is nothing before it to answer", field="messages.0.role")
    before, after = template.text_of(messages[:index], True), template.text_of(messages[: index + 1], False)
    if not whole.startswith(after) or (index + 1 < len(messages) and not after.startswith(before)):
        raise Rewritten(
            f"the chat template writes message {index} differently when more messages follow, so its tokens cannot be told apart: "
            "make one row of each answer, with the answer as its last message",
            field=f"messages.{index}",
        )
    if not after.startswith(before):
        problem = f"the chat template writes message {index}, which is the answer, otherwise than it asks for it"
        raise InvalidInput(f"{problem}: what a model would learn is not what it is asked for", field=f"messages.{index}")
    return len(template.control.unmask(before)), len(template.control.unmask(after))
