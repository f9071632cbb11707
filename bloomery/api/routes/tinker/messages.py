"""Protobuf bodies to operations, results to protobuf bodies."""

from typing import Any, Final, NamedTuple

import numpy as np

from bloomery.api.routes.tinker import proto
from bloomery.api.routes.tinker.meaning import canonical, hash_of_bytes
from bloomery.api.routes.tinker.proto import first_unknown
from bloomery.api.routes.tinker.spans import check_spans
from bloomery.api.routes.tinker.targets import TargetCells
from bloomery.api.routes.tinker.tensors import WIDEST, check_fill, check_sparse, decode_tensor, decode_tokens, encode_records, encode_tensor, filled
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported, shown
from bloomery.types.generation import PromptScored
from bloomery.types.losses import CUSTOM
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult

CONTENT_TYPE: Final = "application/x-protobuf"
ROUTING: Final = "routing"
"""Name of the experts of each token, among the inputs of a datum and among its outputs; this contract has no field of its own for them."""
ROUTING_WEIGHTS: Final = "routing_weights"
"""The same of what their answers are multiplied with."""
RETURN_ROUTING: Final = "return_routing"
"""The option of every loss that asks for the experts."""
RETURN_ROUTING_WEIGHTS: Final = "return_routing_weights"
"""The one that asks for their weights beside them."""
RETURN_LOGPROBS: Final = "return_logprobs"
"""The option of every loss that asks for outputs per token, as everybody gets them who does not say 0."""


class SampleOut(NamedTuple):
    """One finished sample. `top` holds (token, logprob) pairs per token, best first; empty when not asked for."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]
    hit_limit: bool


class PromptOut(NamedTuple):
    """What is told of a prompt: `found` tokens of it needed no computing; the rest where it was asked for."""

    scored: PromptScored | None = None
    logprobs: bool = False
    """Whether those of the prompt's own tokens were asked for."""
    cells: TargetCells | None = None
    found: int = 0


class Parsed(NamedTuple):
    """A forward_backward body."""

    message: Any
    meaning: bytes
    """Hash of the request."""
    filled: int
    """Values of its sparse tensors, zeros among them."""
    unknown: str | None
    """A field that this contract does not have."""

    @property
    def filled_bytes(self) -> int:
        """What its sparse tensors will take."""
        return self.filled * WIDEST


def parse_forward_backward(body: bytes) -> Parsed:
    """The message of a forward_backward body."""
    request = proto.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except proto.DecodeError as error:
        raise InvalidInput(f"the body is not a ForwardBackwardRequest: {error}", field="body") from error
    values = sum(filled(tensor) for datum in request.data for tensor in datum.loss_fn_inputs.values())
    said = canonical(request)
    request.DiscardUnknownFields()
    unknown = None if request.ByteSize() == len(said) else first_unknown(proto.ForwardBackwardRequest.FromString(said))
    return Parsed(request, hash_of_bytes(said), values, unknown)


def forward_backward(parsed: Parsed) -> ForwardBackward:
    """The operation a parsed request asks for."""
    request = parsed.message
    if parsed.unknown is not None:
        raise InvalidInput(f"{parsed.unknown}, which this server does not know: leave it out, or have the server brought up to date", field="body")
    check_fill(parsed.filled)
    config = _loss_config(request)
    return ForwardBackward(
        loss=request.loss_fn,
        return_routing=_flag(config.pop(RETURN_ROUTING, 0.0), RETURN_ROUTING),
        return_routing_weights=_flag(config.pop(RETURN_ROUTING_WEIGHTS, 0.0), RETURN_ROUTING_WEIGHTS),
        return_logprobs=_flag(config.pop(RETURN_LOGPROBS, 1.0), RETURN_LOGPROBS),
        loss_config=config,
        data=tuple(_datum(datum, f"data[{index}]", request.loss_fn) for index, datum in enumerate(request.data)),
        backward=not request.forward_only,
    )


def encode_forward_backward(result: ForwardBackwardResult) -> bytes:
    """The body that answers a forward_backward future."""
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.loss_fn_outputs.extend(encode_records(result.outputs, proto.ArrayRecord))
    for name, value in result.metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


def encode_sample(samples: list[SampleOut], prompt: PromptOut) -> bytes:
    """The body that answers a sample future."""
    response = proto.SampleResponse(prompt_cache_hit_tokens=prompt.found)
    for sample in samples:
        made = response.sequences.add()
        made.stop_reason = proto.STOP_REASONS["STOP_REASON_LENGTH" if sample.hit_limit else "STOP_REASON_STOP"]
        made.tokens = np.asarray(sample.tokens, dtype="<i4").tobytes()
        made.logprobs = np.asarray(sample.logprobs, dtype="<f4").tobytes()
        if sample.top:
            _write_top(made.topk_sampled_logprobs, np.asarray(sample.top, dtype=np.float64))
    if prompt.scored is not None:
        _write_prompt(response, prompt.scored, prompt)
    return bytes(response.SerializeToString())


def _write_prompt(response: Any, scored: PromptScored, prompt: PromptOut) -> None:
    if prompt.logprobs:
        response.prompt_logprobs = scored.logprobs.data
    if scored.top_ids is not None and scored.top_logprobs is not None:
        top = response.topk_prompt_logprobs
        top.length, top.k = scored.top_ids.shape
        top.token_ids, top.logprobs = scored.top_ids.data, scored.top_logprobs.data
    if scored.target_logprobs is not None and prompt.cells is not None:
        response.target_prompt_logprobs.CopyFrom(prompt.cells.answered(scored.target_logprobs.numpy()))
    if scored.drawn_ids is not None and scored.drawn_logprobs is not None:
        response.prompt_alt_tokens.tokens.CopyFrom(encode_tensor(scored.drawn_ids))
        response.prompt_alt_tokens.logprobs.CopyFrom(encode_tensor(scored.drawn_logprobs))


def _write_top(message: Any, pairs: np.ndarray) -> None:
    # Shape [length, k, 2]: token ids stay exact in float64.
    message.length, message.k = pairs.shape[:2]
    message.token_ids = pairs[..., 0].astype("<i4").tobytes()
    message.logprobs = pairs[..., 1].astype("<f4").tobytes()


def _loss_config(request: Any) -> dict[str, float | str]:
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    config = {name: getattr(value, value.WhichOneof("value") or "number") for name, value in request.loss_fn_config_v2.items()}
    for name, value in sorted(request.loss_fn_config.items()):
        if name not in config or not (config[name] == value or (config[name] != config[name] and value != value)):
            field = f"loss_fn_config.{shown(name)}"
            raise InvalidInput(f"`{field}` is {value} there and not so in `loss_fn_config_v2`: say the same in both, or leave out one", field=field)
    return config


def _flag(value: float | str, name: str) -> bool:
    if value not in (0.0, 1.0):
        raise InvalidInput(f"`loss_fn_config.{name}` is {shown(repr(value))}: it must be 0 or 1", field=f"loss_fn_config.{name}")
    return value == 1.0


def _datum(datum: Any, field: str, loss: str) -> Datum:
    chunks = [_text_chunk(chunk, f"{field}.model_input") for chunk in datum.model_input]
    tokens = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32)
    for name, tensor in datum.loss_fn_inputs.items():
        # Those of a custom loss may have any shape.
        check_sparse(tensor, None if loss == CUSTOM else tokens.size, f"{field}.loss_fn_inputs.{shown(name)}")
    inputs = {name: decode_tensor(tensor, f"{field}.loss_fn_inputs.{shown(name)}") for name, tensor in datum.loss_fn_inputs.items()}
    routing, weights = inputs.pop(ROUTING, None), inputs.pop(ROUTING_WEIGHTS, None)
    made = Datum(tokens=Array.of(tokens), routing=routing, routing_weights=weights, inputs=inputs)
    check_spans(datum, made, field, loss)
    return made


def _text_chunk(chunk: Any, field: str) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise NotSupported(f"`{field}` has a chunk of kind {kind}; only encoded_text is offered yet", field=field)
    return decode_tokens(chunk.encoded_text.tokens, field)
