"""The protobuf message that answers a sample, in a descriptor pool of its own: whoever uses the `tinker` SDK has its messages in the default one."""

from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory  # type: ignore[import-untyped]

from bloomery.types.errors import WorkerError

_Field: Final = descriptor_pb2.FieldDescriptorProto
_PACKAGE: Final = "bloomery.client"


class SampledSequence(NamedTuple):
    """One continuation: token ids, each with the log-probability of the distribution that it was drawn from.

    `stopped`: by an end token, which is the last one; otherwise `max_tokens` cut it off.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Likeliest(NamedTuple):
    """The token that is the likeliest at a place, and its log-probability."""

    token: int
    logprob: float


class SampleAnswer(NamedTuple):
    """What came back; `prompt_logprobs`, where asked, are NaN at the first token, and so is the first of `likeliest`."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: tuple[float, ...]
    likeliest: tuple[Likeliest, ...] = ()


def read_answer(body: bytes) -> SampleAnswer:
    """The answer in a body."""
    response = _SampleResponse()
    try:
        response.ParseFromString(body)
    except message.DecodeError as error:
        raise WorkerError(f"the server's answer is no sample: {error}") from error
    scored = tuple(np.frombuffer(response.prompt_logprobs, dtype="<f4").tolist())
    return SampleAnswer(tuple(map(_sequence, response.sequences)), scored, tuple(_likeliest(response.topk_prompt_logprobs)))


def _sequence(sent: Any) -> SampledSequence:
    tokens, logprobs = np.frombuffer(sent.tokens, dtype="<i4"), np.frombuffer(sent.logprobs, dtype="<f4")
    if len(tokens) != len(logprobs):
        raise WorkerError(f"the server's answer has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    return SampledSequence(tuple(tokens.tolist()), tuple(logprobs.tolist()), stopped=sent.stop_reason == 0)


def _likeliest(sent: Any) -> list[Likeliest]:
    tokens, logprobs = np.frombuffer(sent.token_ids, dtype="<i4"), np.frombuffer(sent.logprobs, dtype="<f4")
    # Ids and numbers of a place lie side by side, the likeliest first.
    first = slice(None, None, max(1, sent.k))
    return [Likeliest(*pair) for pair in zip(tokens[first].tolist(), logprobs[first].tolist(), strict=True)]


def _response() -> Any:
    """Fields that are not read here are left out: their numbers stay free."""
    file = descriptor_pb2.FileDescriptorProto(name="bloomery/client.proto", package=_PACKAGE, syntax="proto3")
    sequence = file.message_type.add(name="SampledSequence")
    for number, (name, kind) in enumerate((("stop_reason", _Field.TYPE_INT32), ("tokens", _Field.TYPE_BYTES), ("logprobs", _Field.TYPE_BYTES)), 1):
        sequence.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL, type=kind)
    top = file.message_type.add(name="TopkLogprobs")
    for number, (name, kind) in enumerate((("token_ids", _Field.TYPE_BYTES), ("logprobs", _Field.TYPE_BYTES), ("k", _Field.TYPE_UINT32)), 1):
        top.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL, type=kind)
    response = file.message_type.add(name="SampleResponse")
    response.field.add(name="sequences", number=1, label=_Field.LABEL_REPEATED, type=_Field.TYPE_MESSAGE, type_name=f".{_PACKAGE}.SampledSequence")
    response.field.add(name="prompt_logprobs", number=2, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_BYTES)
    topk = {"name": "topk_prompt_logprobs", "number": 3, "type_name": f".{_PACKAGE}.TopkLogprobs"}
    response.field.add(label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_MESSAGE, **topk)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.SampleResponse"))


_SampleResponse: Final = _response()
