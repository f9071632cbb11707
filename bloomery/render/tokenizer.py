"""The tokenizer of a model directory together with its chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from bloomery.render import chatml
from bloomery.render.control import ControlTokens
from bloomery.render.directory import Directory, read_directory
from bloomery.render.length import Lengths
from bloomery.render.sandbox import Sandbox, unread
from bloomery.render.spelling import Spelling
from bloomery.render.tools import dialect_of
from bloomery.render.training import Messages, Rendered, Template, render_examples, render_training
from bloomery.types.errors import InvalidInput, blame


class ChatTokenizer:
    """Text and messages to tokens and back. Rendering may wait for another process, unless it `renders_here`: call it from a thread then."""

    def __init__(self, directory: Directory) -> None:
        self._tokenizer = directory.tokenizer
        self._template = directory.template
        self._named_tokens = directory.named_tokens
        self._control = ControlTokens(directory.tokenizer)
        self._spelling = Spelling(directory.tokenizer)
        self._lengths = Lengths(directory.tokenizer)
        self._sandbox = None if directory.template is None or directory.template in chatml.TEMPLATES else Sandbox(directory.template)
        self.end_tokens = directory.end_tokens
        """Any of these ends an answer."""
        self.added_tokens = {token.content: number for number, token in directory.tokenizer.get_added_tokens_decoder().items()}
        """Those that are no pieces of text, by what they are written as."""
        self.spoken_tokens = [number for number, token in directory.tokenizer.get_added_tokens_decoder().items() if not token.special]
        """Those of them that are part of what is said."""
        self.dialect = dialect_of(directory.template)
        """How the template has tools called; None where it does not, or in a way that is not known."""
        self.vocab_size: int = directory.tokenizer.get_vocab_size(with_added_tokens=True)
        self.template_hash = None if directory.template is None else blake3(directory.template.encode("utf-8", "surrogatepass")).hexdigest()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a directory that `save_pretrained` wrote; a missing template is an error only when messages are rendered."""
        return cls(read_directory(path))

    @cached_property
    def vocabulary_hash(self) -> str:
        """Of what every token id is written as: where two have the same, ids of one mean the same to the other."""
        pieces = sorted(self._tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda piece: piece[1])
        return blake3("\0".join(f"{number} {text}" for text, number in pieces).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def renders_here(self) -> bool:
        """Whether rendering waits for nobody."""
        return self._sandbox is None

    def close(self) -> None:
        """End the process that renders the template, if one was started."""
        if self._sandbox is not None:
            self._sandbox.close()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text; control tokens in it are control tokens, and what the model wants around every text (a first token) is added."""
        with blame(InvalidInput, "the text cannot be encoded"):
            # Of a batch, because the interpreter's lock is let go of meanwhile.
            tokens: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return tokens

    def check_fits(self, text: str, context: int, field: str) -> None:
        """Refuse at once, as `field`, a text that is certainly longer than a context of so many tokens."""
        if (least := self._lengths.least(text)) > context:
            problem = f"`{field}` has at least {least} tokens and leaves no room in the model's context of {context}"
            raise InvalidInput(f"{problem}: shorten it", field=field)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included; what is not UTF-8 comes out as replacement characters."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        return self._spelling.of(token)

    def render_prompt(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation as the model expects it, up to where its answer begins; what a `context` cannot hold may be refused at once.

        `variables` are JSON values for a template that has such names.
        """
        with blame(InvalidInput, "the messages cannot be encoded"):
            text = self._text(self._masked(messages), add_generation_prompt, tools, variables)
            if context is not None:
                self.check_fits(self._control.unmask(text), context, "messages")
            return self._control.tokens(text)

    def render_training(self, messages: Messages) -> Rendered:
        """Tokens of a whole conversation, and a loss weight of 1 for what the assistant says, the token that ends its turn included.

        A message of the assistant may say its own `weight`.
        """
        with blame(InvalidInput, "the messages cannot be encoded"):
            return render_training(self._masked(messages), _weights(messages), self._template_of(None))

    def render_examples(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[Rendered]:
        """The same where tools may be called; several where the template rewrites earlier turns, one for each answer."""
        with blame(InvalidInput, "the messages cannot be encoded"):
            return render_examples(self._masked(messages), _weights(messages), self._template_of(tools))

    def render_completion(self, prompt: str, completion: str) -> Rendered:
        """Tokens of a text and of what goes on with it, which is learned together with the end. They meet as they do when the text is a prompt."""
        with blame(InvalidInput, "the text cannot be encoded"):
            asked, said = self.encode(prompt), [*self.encode(completion, add_special_tokens=False), *self.end_tokens[:1]]
        return Rendered(asked + said, [0.0] * len(asked) + [1.0] * len(said))

    def _template_of(self, tools: Sequence[Mapping[str, Any]] | None) -> Template:
        return Template(lambda messages, asks: self._text(messages, asks, tools), self._control, self.end_tokens)

    def _masked(self, messages: Messages) -> list[dict[str, Any]]:
        if not messages:
            raise InvalidInput("`messages` is empty: it needs at least one", field="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
                raise InvalidInput(f"message {index} is not an object with a `role`", field=f"messages.{index}")
        # A key without a value is a missing key to templates: many would write the word "None".
        return [{key: self._control.mask(value) for key, value in message.items() if value is not None and key != "weight"} for message in messages]

    def _text(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise InvalidInput("this model has no chat template and cannot take messages: send a prompt to /v1/completions instead", field="messages")
        if tools and "tools" not in self._template:
            raise InvalidInput("the chat template of this model has no place for tools", field="tools")
        if "tool_calls" not in self._template and any(message.get("tool_calls") for message in messages):
            raise InvalidInput("the chat template of this model has no place for calls of tools: leave those messages out", field="messages")
        asked = {"messages": messages, "tools": self._control.mask(tools), "add_generation_prompt": add_generation_prompt, **self._named_tokens}
        variables = variables or {}
        if said := variables.keys() & asked.keys():
            field = f"chat_template_kwargs.{min(said)}"
            raise InvalidInput(f"`{field}` is said to the template by the rest of the request, or by the model: leave it out", field=field)
        if self._sandbox is not None:
            return self._sandbox.render({"documents": None, **asked}, self._control.mask(variables))
        if variables:
            raise unread(min(variables))
        return chatml.render(messages, add_generation_prompt=add_generation_prompt)


def _weights(messages: Messages) -> list[float]:
    return [1.0 if (weight := message.get("weight")) is None else weight for message in messages]
