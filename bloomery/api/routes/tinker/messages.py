"""Protobuf bodies to operations, results to protobuf bodies."""

from typing import Any, Final, NamedTuple

import numpy as np

from bloomery.api.routes.tinker import proto
from bloomery.api.routes.tinker.tensors import check_fill, decode_tensor, decode_tokens, encode_records
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.operations import Datum, ForwardBackward, ForwardBackwardResult

CONTENT_TYPE: Final = "application/x-protobuf"


class SampleOut(NamedTuple):
    """One finished sample. `top` holds (token, logprob) pairs per token, best first; empty when not asked for."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]
    hit_limit: bool


class PromptOut(NamedTuple):
    """Log-probabilities of the prompt's tokens, float32 [P], and of the likeliest ones, int32 and float32 [P, k]; each where asked for."""

    logprobs: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


def parse_forward_backward(body: bytes) -> Any:
    """The message of a forward_backward body."""
    request = proto.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except proto.DecodeError as error:
        raise InvalidInput(f"the body is not a ForwardBackwardRequest: {error}") from error
    return request


def forward_backward(request: Any) -> ForwardBackward:
    """The operation a parsed request asks for."""
    check_fill(tensor for datum in request.data for tensor in datum.loss_fn_inputs.values())
    return ForwardBackward(
        loss=request.loss_fn,
        loss_config=_loss_config(request),
        data=tuple(_datum(datum, f"data[{index}]") for index, datum in enumerate(request.data)),
        backward=not request.forward_only,
    )


def encode_forward_backward(result: ForwardBackwardResult) -> bytes:
    """The body that answers a forward_backward future."""
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.loss_fn_outputs.extend(encode_records(result.outputs, proto.ArrayRecord))
    for name, value in result.metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


def encode_sample(samples: list[SampleOut], prompt: PromptOut | None) -> bytes:
    """The body that answers a sample future."""
    response = proto.SampleResponse()
    for sample in samples:
        made = response.sequences.add()
        made.stop_reason = proto.STOP_REASONS["STOP_REASON_LENGTH" if sample.hit_limit else "STOP_REASON_STOP"]
        made.tokens = np.asarray(sample.tokens, dtype="<i4").tobytes()
        made.logprobs = np.asarray(sample.logprobs, dtype="<f4").tobytes()
        if sample.top:
            _write_top(made.topk_sampled_logprobs, np.asarray(sample.top, dtype=np.float64))
    if prompt is not None:
        if prompt.logprobs is not None:
            response.prompt_logprobs = prompt.logprobs.astype("<f4").tobytes()
        if prompt.top_ids is not None and prompt.top_logprobs is not None:
            _write_top(response.topk_prompt_logprobs, np.stack([prompt.top_ids, prompt.top_logprobs], axis=-1))
    return bytes(response.SerializeToString())


def _write_top(message: Any, pairs: np.ndarray) -> None:
    # Shape [length, k, 2]: token ids stay exact in float64.
    message.length, message.k = pairs.shape[:2]
    message.token_ids = pairs[..., 0].astype("<i4").tobytes()
    message.logprobs = pairs[..., 1].astype("<f4").tobytes()


def _loss_config(request: Any) -> dict[str, float | str]:
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {name: getattr(value, value.WhichOneof("value") or "number") for name, value in request.loss_fn_config_v2.items()}


def _datum(datum: Any, field: str) -> Datum:
    if datum.model_input_spans or datum.loss_fn_input_spans:
        raise NotSupported(f"`{field}` has provenance spans, which no loss offered here reads yet; send the datum without them", field=field)
    chunks = [_text_chunk(chunk, f"{field}.model_input") for chunk in datum.model_input]
    tokens = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32)
    inputs = {name: decode_tensor(tensor, f"{field}.loss_fn_inputs.{name}") for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(tokens=Array.of(tokens), inputs=inputs)


def _text_chunk(chunk: Any, field: str) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise NotSupported(f"`{field}` has a chunk of kind {kind}; only encoded_text is offered yet", field=field)
    return decode_tokens(chunk.encoded_text.tokens, field)
