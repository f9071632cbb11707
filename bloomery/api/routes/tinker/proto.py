"""The protobuf messages of the tinker contract, in a descriptor pool of their own.

The SDK registers its generated messages in protobuf's default pool; a private pool lets both live in one process.
Only field numbers and types travel, so the table below is the whole contract: a field's number is its place in the line,
`*` means repeated, `?` optional with presence, `|group` a member of the oneof `group`, `{X}` a map from string to X.
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory  # type: ignore[import-untyped]
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

DecodeError = message.DecodeError

DTYPES: Final = {"DTYPE_UNSPECIFIED": 0, "DTYPE_FLOAT32": 1, "DTYPE_INT64": 2, "DTYPE_INT32": 3, "DTYPE_BFLOAT16": 4}
STOP_REASONS: Final = {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}
_ENUMS: Final = {"DType": DTYPES, "StopReason": STOP_REASONS}

_MESSAGES: Final = {
    "ForwardBackwardRequest": (
        "model_id:string seq_id:int32 data:Datum* loss_fn:string loss_fn_config:{double} forward_only:bool loss_fn_config_v2:{LossConfigValue}"
    ),
    "LossConfigValue": "number:double|value text:string|value",
    "Datum": "model_input:Chunk* loss_fn_inputs:{Tensor} model_input_spans:ProvenanceSpan* loss_fn_input_spans:ProvenanceSpan*",
    "Chunk": "encoded_text:EncodedTextChunk|chunk image:ImageChunk|chunk dmel:DmelChunk|chunk",
    "EncodedTextChunk": "tokens:bytes",
    "ImageChunk": "data:bytes format:string expected_tokens:int32? override_dimensions:ImageDimensions?",
    "ImageDimensions": "width:uint32 height:uint32",
    "DmelChunk": "dmel:bytes",
    "ProvenanceSpan": "prompt_tokens:PromptProvenanceSpan|span sampled_tokens:SampledProvenanceSpan|span",
    "PromptProvenanceSpan": "sequence_id:string offset:int64 length:int64",
    "SampledProvenanceSpan": "sequence_id:string offset:int64 length:int64",
    "Tensor": "dense:bytes|encoding sparse_csr:SparseCsr|encoding dtype:DType shape:int64*",
    "SparseCsr": "values:bytes crow_indices:bytes col_indices:bytes",
    "ForwardBackwardOutput": "loss_fn_output_type:string loss_fn_outputs:ArrayRecord* metrics:{double}",
    "ArrayRecord": "type_tag:string fields:{BatchedTensor} num_datums:int64",
    "BatchedTensor": "data:bytes offsets:bytes dtype:DType trailing_shape:int64*",
    "SampleResponse": (
        "sequences:SampledSequence* prompt_logprobs:bytes? topk_prompt_logprobs:TopkLogprobs? prompt_cache_hit_tokens:int32"
        " target_prompt_logprobs:Tensor? prompt_alt_tokens:PromptAltTokens?"
    ),
    "SampledSequence": "stop_reason:StopReason tokens:bytes logprobs:bytes? topk_sampled_logprobs:TopkLogprobs?",
    "TopkLogprobs": "token_ids:bytes logprobs:bytes k:uint32 length:uint32",
    "PromptAltTokens": "tokens:Tensor logprobs:Tensor",
}

_PACKAGE: Final = "bloomery.tinker"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="bloomery/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for label, number in values.items():
            enum.value.add(name=label, number=number)
    for name, line in _MESSAGES.items():
        _add_message(file.message_type.add(name=name), line)
    return file


def _add_message(made: Any, line: str) -> None:
    for number, item in enumerate(line.split(), start=1):
        name, kind = item.split(":")
        kind, _, group = kind.partition("|")
        field = made.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
        if group:
            field.oneof_index = _oneof(made, group)
        if kind.startswith("{"):
            entry = _map_entry(made, name, kind.strip("{}"))
            field.label, field.type, field.type_name = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE, f".{_PACKAGE}.{made.name}.{entry}"
            continue
        if kind.endswith("*"):
            field.label = _Field.LABEL_REPEATED
        _set_type(field, kind.rstrip("*?"))
    # Presence of a plain field is spelled as a oneof of one member; these must come after the real ones.
    for field, item in zip(made.field, line.split(), strict=True):
        if item.endswith("?"):
            field.proto3_optional = True
            field.oneof_index = _oneof(made, f"_{field.name}")


def _oneof(made: Any, group: str) -> int:
    names = [oneof.name for oneof in made.oneof_decl]
    if group not in names:
        made.oneof_decl.add(name=group)
        names.append(group)
    return names.index(group)


def _map_entry(made: Any, field: str, value_kind: str) -> str:
    entry = made.nested_type.add(name="".join(part.capitalize() for part in field.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), value_kind)
    return str(entry.name)


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
Tensor = _message("Tensor")
ArrayRecord = _message("ArrayRecord")


def first_unknown(found: Any) -> str | None:
    """A field of a message, or of one in it, that the table above lacks or knows with another type."""
    for field in UnknownFieldSet(found):
        return f"a `{found.DESCRIPTOR.name}` has field number {field.field_number} of wire type {field.wire_type}"
    for descriptor, value in found.ListFields():
        if descriptor.message_type is None:
            continue
        if descriptor.message_type.GetOptions().map_entry:
            inner = list(value.values()) if descriptor.message_type.fields_by_name["value"].message_type is not None else []
        else:
            inner = [value] if isinstance(value, message.Message) else list(value)
        for each in inner:
            if (unknown := first_unknown(each)) is not None:
                return unknown
    return None
