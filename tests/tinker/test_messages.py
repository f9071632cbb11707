"""Our protobuf against the SDK's own: the same descriptors, and bodies that either side reads as the other wrote them."""

import contextlib

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from bloomery.api.routes.tinker import messages, proto
from bloomery.api.routes.tinker.tensors import MAX_ELEMENTS
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput, NotSupported
from bloomery.types.generation import PromptScored
from bloomery.types.operations import ForwardBackward, ForwardBackwardResult

FLOATS = st.floats(width=32, allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


def sdk_body(
    data: list[types.Datum], loss: str = "cross_entropy", config: dict[str, float | str] | None = None, *, forward_only: bool = False
) -> bytes:
    """The bytes the SDK would post."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config), model_id="s:train:0", seq_id=7
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def parsed(body: bytes):
    return messages.forward_backward(messages.parse_forward_backward(body))


def fields_of(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[str, str], tuple]:
    found = {}

    def visit(message, prefix: str) -> None:
        for field in message.field:
            oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
            kind = field.type_name.rsplit(".", 1)[-1]
            found[prefix + message.name, field.name] = (field.number, field.label, field.type, kind, oneof, field.proto3_optional)
        for nested in message.nested_type:
            visit(nested, f"{prefix}{message.name}.")

    for message in file.message_type:
        visit(message, "")
    return found


def test_every_field_has_the_number_and_type_of_the_sdks() -> None:
    theirs, ours = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    sdk.DESCRIPTOR.CopyToProto(theirs)
    proto.ForwardBackwardRequest.DESCRIPTOR.file.CopyToProto(ours)
    wanted, made = fields_of(theirs), fields_of(ours)
    assert {key: wanted[key] for key in made} == made
    assert {message for message, _ in wanted} - {message for message, _ in made} == {"SamplingParams", "StopStrings", "StopTokens"}


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(TOKENS, min_size=1, max_size=3), data=st.data())
def test_a_request_of_the_sdk_becomes_the_operation_it_means(tokens: list[list[int]], data: st.DataObject) -> None:
    weights = [data.draw(st.lists(FLOATS, min_size=len(row), max_size=len(row))) for row in tokens]
    made = [
        types.Datum(
            model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=row[:1]), types.EncodedTextChunk(tokens=row[1:])]),
            loss_fn_inputs={"target_tokens": row, "weights": values},
        )
        for row, values in zip(tokens, weights, strict=True)
    ]
    operation = parsed(sdk_body(made, config={"beta": 0.5, "mode": "plain"}, forward_only=True))
    assert (operation.loss, operation.loss_config, operation.backward) == ("cross_entropy", {"beta": 0.5, "mode": "plain"}, False)
    for datum, row, values in zip(operation.data, tokens, weights, strict=True):
        assert datum.tokens.dtype == "int32"
        assert datum.tokens.numpy().tolist() == row
        assert datum.inputs["target_tokens"].numpy().tolist() == row
        assert datum.inputs["weights"].numpy().tolist() == np.asarray(values, dtype=np.float32).tolist()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_sparse_targets_arrive_dense(rows: int, columns: int, seed: int) -> None:
    import torch

    random = np.random.default_rng(seed)
    dense = random.integers(1, 9, (rows, columns)) * (random.random((rows, columns)) < 0.2)
    datum = types.Datum(model_input=types.ModelInput.from_ints([1] * rows), loss_fn_inputs={"target_tokens": torch.from_numpy(dense)})
    (arrived,) = parsed(sdk_body([datum])).data
    assert arrived.inputs["target_tokens"].numpy().tolist() == dense.tolist()


@pytest.mark.parametrize(
    ("dtype", "values", "expected"), [(4, np.array([0x3FC0, 0xC000], "<u2"), [1.5, -2.0]), (3, np.array([3, -1], "<i4"), [3, -1])]
)
def test_narrow_values_are_widened(dtype: int, values: np.ndarray, expected: list[float]) -> None:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    tensor = request.data.add().loss_fn_inputs["x"]
    tensor.dtype, tensor.dense = dtype, values.tobytes()
    assert parsed(request.SerializeToString()).data[0].inputs["x"].numpy().tolist() == expected


def test_a_sparse_tensor_that_no_row_has_is_refused_before_it_is_filled_in() -> None:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    request.data.add().model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    tensor = request.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.sparse_csr.crow_indices = 1, np.zeros(2, "<i8").tobytes()
    tensor.shape.extend([1, 1 << 26])
    body = request.SerializeToString()
    assert len(body) < 200
    assert messages.parse_forward_backward(body).filled_bytes == 8 << 26
    with pytest.raises(InvalidInput, match=r"is sparse \[1, 67108864\], expected \[3, K\]") as refused:
        parsed(body)
    assert refused.value.field == "data[0].loss_fn_inputs.weights"


def test_sides_that_no_memory_has_are_neither_multiplied_nor_told() -> None:
    huge = (1 << 62) + 1
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    tensor = request.data.add().loss_fn_inputs["weights"]
    tensor.dtype, tensor.sparse_csr.crow_indices = 1, np.zeros(2, "<i8").tobytes()
    tensor.shape.extend([huge] * 40_000)
    body = request.SerializeToString()
    assert messages.parse_forward_backward(body).filled_bytes == 0
    with pytest.raises(InvalidInput, match=r"needs a shape \[rows, columns\] of at most 67108864 values, not one of 40000 sides") as refused:
        parsed(body)
    assert refused.value.field == "data[0].loss_fn_inputs.weights"
    del tensor.shape[2:]
    for _ in range(3):
        request.data.add().CopyFrom(request.data[0])
    body = request.SerializeToString()
    assert messages.parse_forward_backward(body).filled == 4 * (MAX_ELEMENTS + 1)
    with pytest.raises(InvalidInput, match="more than 67108864 values in all"):
        parsed(body)
    tensor.ClearField("shape")
    tensor.shape.extend([3] * 40_000)
    tensor.dense = bytes(4)
    with pytest.raises(InvalidInput, match="has 1 values, which do not fill its shape, one of 40000 sides"):
        parsed(sdk.ForwardBackwardRequest(loss_fn="cross_entropy", data=request.data[:1]).SerializeToString())


def test_fields_that_the_contract_lacks_are_refused_by_number_and_place() -> None:
    body = sdk_body([types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [1, 2]})])
    with pytest.raises(InvalidInput, match="`ForwardBackwardRequest` has field number 99 of wire type 0"):
        parsed(body + bytes([0x98, 0x06, 0x01]))
    request = sdk.ForwardBackwardRequest.FromString(body)
    tensor = request.data[0].loss_fn_inputs["target_tokens"]
    tensor.MergeFromString(bytes([0x98, 0x06, 0x01]))
    with pytest.raises(InvalidInput, match="`Tensor` has field number 99"):
        parsed(request.SerializeToString())
    parsed(body)


@pytest.mark.parametrize(("first", "second"), [({"beta": 0.5, "gamma": 1.0}, {"beta": 0.5}), ({"beta": 0.5}, {"beta": 0.25})])
def test_options_of_the_older_field_that_the_newer_lacks_are_not_ignored(first: dict[str, float], second: dict[str, float]) -> None:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy", loss_fn_config=first)
    for name, value in second.items():
        request.loss_fn_config_v2[name].number = value
    with pytest.raises(InvalidInput, match=r"loss_fn_config\.(gamma|beta)"):
        parsed(request.SerializeToString())


def test_a_message_means_the_same_in_whatever_order_its_maps_are_written() -> None:
    one, other = ({name: [1.0, 2.0] for name in names} for names in (("weights", "mask"), ("mask", "weights")))
    meanings = []
    for inputs in (one, other, {"weights": [1.0, 3.0], "mask": [1.0, 2.0]}):
        request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
        made = request.data.add()
        for name, values in inputs.items():
            made.loss_fn_inputs[name].dense = np.asarray(values, "<f4").tobytes()
        meanings.append(messages.parse_forward_backward(request.SerializeToString()).meaning)
    assert meanings[0] == meanings[1] != meanings[2]


OUTPUTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
        lambda shape: {
            "logprobs": Array.of(np.linspace(-3, 0, shape[0] * max(shape[1], 1), dtype=np.float32).reshape(shape if shape[1] else shape[:1])),
            "ids": Array.of(np.arange(shape[0], dtype=np.int64)),
        }
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(outputs=OUTPUTS)
def test_the_sdk_reads_results_as_they_are(outputs: list[dict[str, Array]]) -> None:
    result = ForwardBackwardResult(outputs=tuple(outputs), metrics={"loss:sum": 1.25})
    read = deserialize_forward_backward_output(messages.encode_forward_backward(result))
    assert read.metrics == {"loss:sum": 1.25}
    assert len(read.loss_fn_outputs) == len(outputs)
    for mine, theirs in zip(outputs, read.loss_fn_outputs, strict=True):
        assert {name: (value.dtype, tuple(value.shape)) for name, value in theirs.items()} == {n: (a.dtype, a.shape) for n, a in mine.items()}
        assert all(np.array_equal(theirs[name].to_numpy().reshape(array.shape), array.numpy()) for name, array in mine.items())


def test_the_sdk_reads_samples_with_prompt_and_top_logprobs() -> None:
    top = ((5, -0.5), (6, -1.5))
    samples = [
        messages.SampleOut(tokens=[5, 6], logprobs=[-0.5, -2.0], top=[top, top], hit_limit=False),
        messages.SampleOut(tokens=[7], logprobs=[-0.25], top=[], hit_limit=True),
    ]
    scored = PromptScored(
        request_id="r",
        logprobs=Array.of(np.array([np.nan, -1.0], np.float32)),
        top_ids=Array.of(np.array([[0, 0], [2**31 - 1, 4]], np.int32)),
        top_logprobs=Array.of(np.array([[-99999.0, -99999.0], [-0.5, -0.75]], np.float32)),
        drawn_ids=Array.of(np.array([[7, 8, 9]], np.int32)),
        drawn_logprobs=Array.of(np.array([[-1.0, -2.0, -3.0]], np.float32)),
    )
    read = deserialize_sample_response(messages.encode_sample(samples, messages.PromptOut(scored, logprobs=True, found=11)))
    assert [(s.tokens, s.logprobs, s.stop_reason) for s in read.sequences] == [([5, 6], [-0.5, -2.0], "stop"), ([7], [-0.25], "length")]
    assert read.sequences[0].topk_logprobs == [[(5, -0.5), (6, -1.5)]] * 2
    assert read.prompt_logprobs == [None, -1.0]
    assert read.topk_prompt_logprobs == [None, [(2**31 - 1, -0.5), (4, -0.75)]]
    assert read.prompt_alt_tokens is not None
    drawn = (read.prompt_alt_tokens.tokens, read.prompt_alt_tokens.logprobs)
    assert [(tensor.dtype, tensor.shape, tensor.tolist()) for tensor in drawn] == [
        ("int64", [1, 3], [[7, 8, 9]]),
        ("float32", [1, 3], [[-1.0, -2.0, -3.0]]),
    ]
    assert read.prompt_cache_hit_tokens == 11
    assert read.target_prompt_logprobs is None
    silent = deserialize_sample_response(messages.encode_sample(samples, messages.PromptOut()))
    assert (silent.prompt_logprobs, silent.topk_prompt_logprobs, silent.prompt_alt_tokens, silent.prompt_cache_hit_tokens) == (None, None, None, 0)
    unasked = deserialize_sample_response(messages.encode_sample(samples, messages.PromptOut(scored)))
    assert unasked.prompt_logprobs is None


def body_with(**tensor) -> bytes:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    target = request.data.add().loss_fn_inputs["weights"]
    sparse = tensor.pop("sparse", None)
    if sparse is not None:
        target.sparse_csr.values, target.sparse_csr.crow_indices, target.sparse_csr.col_indices = sparse
    for name, value in tensor.items():
        if name == "shape":
            target.shape.extend(value)
        else:
            setattr(target, name, value)
    return request.SerializeToString()


def ints(*values: int) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


FLOAT = np.float32(1).tobytes()


@pytest.mark.parametrize(
    "body",
    [
        body_with(dense=b"1234"),
        body_with(dense=b"123", dtype=1),
        body_with(dense=FLOAT * 3, dtype=1, shape=[2]),
        body_with(dense=FLOAT * 4, dtype=1, shape=[-2, -2]),
        body_with(dense=FLOAT, dtype=1, shape=[2**62, 4]),
        body_with(sparse=(FLOAT, ints(0, 1), ints(0)), dtype=1),
        body_with(sparse=(FLOAT, ints(0, 1), ints(5)), dtype=1, shape=[1, 2]),
        body_with(sparse=(FLOAT, ints(0, 2), ints(0)), dtype=1, shape=[1, 2]),
        body_with(sparse=(FLOAT * 2, ints(0, 3, 2), ints(0, 1)), dtype=1, shape=[2, 2]),
    ],
)
def test_malformed_tensors_name_their_field(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"data\[0\]\.loss_fn_inputs\.weights"):
        parsed(body)


@pytest.mark.parametrize("shapes", [[[2**31, 2**31]], [[1, 2**25]] * 3])
def test_sparse_tensors_that_would_fill_the_memory_are_refused_together(shapes: list[list[int]]) -> None:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    for shape in shapes:
        tensor = request.data.add().loss_fn_inputs["weights"]
        tensor.sparse_csr.values, tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = FLOAT, ints(0, 1), ints(0)
        tensor.dtype, tensor.shape[:] = 1, shape
    with pytest.raises(InvalidInput, match="send fewer data"):
        parsed(request.SerializeToString())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_refused_in_our_own_words(body: bytes) -> None:
    # Nothing but an operation or an error of our tree comes out.
    with contextlib.suppress(InvalidInput, NotSupported):
        assert all(datum.tokens.dtype == "int32" for datum in parsed(body).data)


def test_what_is_not_offered_is_refused() -> None:
    image = types.Datum(model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]), loss_fn_inputs={})
    with pytest.raises(NotSupported, match="encoded_text"):
        parsed(sdk_body([image]))


def with_spans(inputs: list, outputs: list, loss: str = "stable_reinforce", **made: list) -> ForwardBackward:
    """A datum of four tokens and three sampled targets with these spans, as the server reads it."""
    values = {"target_tokens": [2, 3, 4, 5], "logprobs": [0.0, -1.0, -1.0, -1.0], "advantages": [0.0, 1.0, 1.0, 1.0], **made}
    return parsed(sdk_body([types.Datum(types.ModelInput.from_ints([1, 2, 3, 4]), values, inputs, outputs)], loss))


def prompt(length: int, **fields) -> types.PromptProvenanceSpan:
    return types.PromptProvenanceSpan(**{"sequence_id": "a", "length": length, **fields})


def drawn(length: int, **fields) -> types.SampledProvenanceSpan:
    return types.SampledProvenanceSpan(**{"sequence_id": "a", "length": length, **fields})


def test_provenance_spans_that_tile_the_datum_change_nothing() -> None:
    without = parsed(sdk_body([types.Datum(types.ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": [2, 3, 4, 5]})])).data[0]
    annotated = with_spans([prompt(2), drawn(2), prompt(0)], [prompt(1, offset=1), drawn(2), drawn(1, sequence_id="b")])
    assert annotated.data[0].tokens == without.tokens
    assert annotated.data[0].inputs["target_tokens"] == without.inputs["target_tokens"]
    # Other losses have advantages where they like.
    with_spans([prompt(4)], [prompt(4)], "importance_sampling")


@pytest.mark.parametrize(
    ("inputs", "outputs", "field", "says"),
    [
        ([prompt(2)], [prompt(1), drawn(3)], "data[0].model_input_spans", "cover 2 positions, but `model_input` has 4"),
        ([prompt(2), drawn(2)], [prompt(1), drawn(4)], "data[0].loss_fn_input_spans", "cover 5 positions, but `target_tokens` has 4"),
        ([prompt(4)], [], "data[0].loss_fn_input_spans", "both or neither"),
        ([], [drawn(4)], "data[0].model_input_spans", "both or neither"),
        ([prompt(4)], [prompt(2), drawn(2)], "data[0].loss_fn_inputs.advantages", "1.0 at position 1"),
    ],
)
def test_provenance_spans_that_cannot_be_are_refused(inputs: list, outputs: list, field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        with_spans(inputs, outputs)
    assert refused.value.field == field
    assert says in refused.value.message


@pytest.mark.parametrize(
    "broken",
    [{}, {"length": 1}, {"sequence_id": "a", "length": -1}, {"sequence_id": "a", "length": 1, "offset": -1}],
    ids=["none", "id", "length", "offset"],
)
def test_a_span_that_the_sdk_would_not_make_is_refused(broken: dict) -> None:
    request = sdk.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
        span = spans.add()
        if broken:
            span.sampled_tokens.CopyFrom(sdk.SampledProvenanceSpan(**broken))
    with pytest.raises(InvalidInput, match=r"`data\[0\]\.model_input_spans\[0\]`"):
        parsed(request.SerializeToString())
