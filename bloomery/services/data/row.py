"""A row of a data set as services hold it, its identity, and its stored line."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from blake3 import blake3
from pydantic import TypeAdapter

from bloomery.types.datasets import AnyRow, RowKind
from bloomery.types.resources import LabelSource, Split

Message = dict[str, Any]
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_RESOURCE: Final[TypeAdapter[AnyRow]] = TypeAdapter(AnyRow)


class Row(NamedTuple):
    """One example. Of a chat row `messages` is all of the conversation, its last the answer to learn; of others what comes before the answer."""

    messages: tuple[Message, ...]
    label_source: LabelSource = "import"
    source_span: str | None = None
    kind: RowKind = "chat"
    rest: Mapping[str, Any] = NOTHING
    """What it has beside messages, under the names of its resource; nothing that is as it is by default."""
    group: str | None = None
    """Hash of the field by which its data set was split."""

    @property
    def prompt(self) -> str:
        """What was asked, without the answer: two rows with one prompt must not stand on both sides of a split."""
        asked = self.messages[:-1] if self.kind == "chat" else self.messages
        said = "\n".join(_said(message) for message in asked if message["role"] != "system")
        # A text without a prompt is its own.
        return said or self.rest.get("prompt") or self.answer

    @property
    def answer(self) -> str:
        """What the model learns to say; nothing where graders decide that."""
        if self.kind == "chat":
            return _said(self.messages[-1])
        answer = self.rest.get("completion", self.rest.get("preferred", ""))
        return answer if isinstance(answer, str) else "\n".join(map(_said, answer))

    @property
    def hash(self) -> str:
        """Identity of the content, whatever its source and the order of its fields."""
        plain = self.kind == "chat" and not self.rest
        content = self.messages if plain else {"kind": self.kind, "messages": self.messages, **self.rest}
        return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def line(self, split: Split) -> str:
        """The stored form; inside tools and items fields stay in the order in which models are to see them."""
        return json.dumps(dict(sorted(self._stored(split).items())))

    def canonical(self, split: Split) -> str:
        """The same whatever the order of fields: what a version's hash is computed of."""
        return json.dumps(self._stored(split), sort_keys=True)

    def resource(self) -> AnyRow:
        """As it is shown."""
        fields = {"kind": self.kind, "label_source": self.label_source, "source_span": self.source_span, **self.rest}
        return _RESOURCE.validate_python(fields | ({"messages": list(self.messages)} if self.messages else {}))

    def _stored(self, split: Split) -> dict[str, Any]:
        messages = [dict(sorted(message.items())) for message in self.messages]
        stored = {"split": split, "messages": messages, "label_source": self.label_source, "source_span": self.source_span}
        more = {"kind": None if self.kind == "chat" else self.kind, "rest": dict(self.rest) or None, "group": self.group}
        return stored | {name: value for name, value in more.items() if value is not None}


def stored_row(line: bytes) -> Row:
    """What `Row.line` wrote, in this release or an earlier one."""
    stored = json.loads(line)
    messages = tuple(stored["messages"])
    more = (stored.get("kind", "chat"), stored.get("rest", NOTHING), stored.get("group"))
    return Row(messages, stored["label_source"], stored["source_span"], *more)


def group_of(value: Any) -> str:
    """The hash of what a group is named by."""
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest(length=16)


def _said(message: Message) -> str:
    calls = message.get("tool_calls")
    said: str = message.get("content") or ""
    return said if not calls else said + json.dumps([call["function"] for call in calls], sort_keys=True)
