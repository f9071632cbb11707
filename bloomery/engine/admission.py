"""What fits: the memory of an operation is known before it runs. One that would not fit if nobody else held any is refused then; others wait for it.

Micro-batches bound the rows of a pass, but one sequence can be as long as the context, and one prediction can have many soft targets. The estimate
is an upper bound of what forward and backward hold at once; `tests/engine/test_admission.py` holds it against real peaks.
Shapes: R rows, D hidden, K targets per row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from bloomery.engine.memory import MEMORY_WAIT_S, Memory
from bloomery.models.config import DecoderConfig, LayerHeads, RecurrentConfig
from bloomery.models.decoder import Decoder
from bloomery.models.factors import padded_rank
from bloomery.models.head import CHUNK_BYTES
from bloomery.models.native import attention, split_gemm
from bloomery.models.pads import KEY_PAD, LENGTH_PAD, ROW_PAD, pad_to, split
from bloomery.models.targets import adapter_targets
from bloomery.train.full import count_parts
from bloomery.train.passes import Share, exact_attention
from bloomery.train.trainable import Trainable
from bloomery.types.footprint import CHECKPOINT_BYTES, HELD_BYTES, full_run_bytes, trained_parts
from bloomery.types.losses import LOSSES, TARGETS
from bloomery.types.operations import Datum, ForwardBackward, LoadCheckpoint, LoraSpec, Operation, OptimStep, SaveCheckpoint, SaveSnapshot
from bloomery.types.probe import probe_tokens

_CPU: Final = torch.device("cpu")

_HEAD_BYTES: Final = 4 * CHUNK_BYTES
"""Logits of a chunk with their gradient and its copies."""
_PLACES: Final = 4 / 3
"""Attention regroups rows by padded length, which makes them at most so many more."""
_BYTES_PER_TARGET: Final = 40
"""Target, weight, log-probability, term and gradient of one prediction, on the host and on the device."""
_STEP_BYTES: Final = 64 << 20
"""A step changes masters and moments where they are; its norm is made of pieces in float64."""
_JOINED: Final = 4
"""Projections of one input have one block-diagonal factor in the forward, which is so many times as large as theirs: query, key and value, or the
four of a gated delta layer."""


class Need(NamedTuple):
    """Memory that an operation takes beside what is held already, at the most."""

    bytes: int
    device: torch.device
    what: str
    advice: str


class Lack(NamedTuple):
    """Why an operation cannot run now."""

    message: str
    for_ever: bool
    """Whether it would not fit if nobody else held any memory."""

    @property
    def in_vain(self) -> str:
        """The same when its time to wait is over."""
        return f"{self.message}, and no more came free in {MEMORY_WAIT_S:.0f} s: other runs, versions in use or other processes hold it"


def lack(need: Need, weights: Trainable, memory: Memory) -> Lack | None:
    """What is missing for it, or None: whether something is missing for ever depends on the machine, the base model and the run alone."""
    return _lack(need, lambda: held_bytes(weights) if weights.decoder.device == need.device else 0, memory)


def lack_to_open(spec: LoraSpec, decoder: Decoder, memory: Memory) -> Lack | None:
    """The same for a run to be held."""
    return _lack(opening_need(spec, decoder), lambda: base_bytes(decoder), memory)


def _lack(need: Need, held: Callable[[], int], memory: Memory) -> Lack | None:
    """`held`: what is held there in any case; nobody is asked who lacks nothing."""
    free = memory.free(need.device)
    if need.bytes <= free:
        return None
    idle = memory.whole(need.device) - held()
    needs = f"{need.what} needs about {_gigabytes(need.bytes)} of memory"
    if need.bytes <= idle:
        return Lack(f"{needs}, {_gigabytes(free)} are free", for_ever=False)
    return Lack(f"{needs}, an engine that does nothing else has {_gigabytes(max(0, idle))} for it: {need.advice}", for_ever=True)


def operation_need(operation: Operation, weights: Trainable, budget_tokens: int) -> Need | None:
    """What the operation takes; None where that is nothing worth mentioning."""
    trained, slimmer = weights.masters.numel(), "make a run of lower rank, or of fewer parts of the model"
    match operation:
        case ForwardBackward():
            return _need_of_passes(operation, weights, budget_tokens)
        case OptimStep():
            return Need(_STEP_BYTES + _largest(weights), weights.decoder.device, "this step", slimmer)
        case SaveCheckpoint() | LoadCheckpoint():
            # Of what is on another device the parts of a checkpoint are copied first.
            copies = 1 if weights.decoder.device == _CPU else 2
            return Need(copies * trained * CHECKPOINT_BYTES + _largest(weights), _CPU, "a checkpoint of this run", slimmer)
        case SaveSnapshot():
            return Need(_snapshot_bytes(weights), _CPU, "a snapshot of this run", slimmer)
        case _:
            return None


def held_bytes(weights: Trainable) -> int:
    """Lower bound of what is held for a run to exist at all: its base model, its masters, gradients and moments."""
    return base_bytes(weights.decoder) + weights.masters.numel() * HELD_BYTES


def base_bytes(decoder: Decoder) -> int:
    """Of a model's parameters."""
    return sum(parameter.nbytes for parameter in decoder.parameters())


def _need_of_passes(operation: ForwardBackward, weights: Trainable, budget_tokens: int) -> Need:
    """Of the largest one; between two of them nothing stays."""
    decoder, lengths = weights.decoder, [datum.tokens.shape[0] for datum in operation.data]
    exact = exact_attention(operation.custom is not None or LOSSES[operation.loss].exact, operation.backward)
    parts = [operation.data[part] for part in split(lengths, budget_tokens)]
    needs = [pass_bytes(part, decoder.config, decoder.dtype, exact=exact, backward=operation.backward, device=decoder.device) for part in parts]
    longest = max(datum.tokens.shape[0] for datum in parts[needs.index(max(needs))])
    what = f"the largest micro-batch of this operation (longest sequence {longest} tokens)"
    return Need(max(needs) + weights.backward_bytes * operation.backward, decoder.device, what, "send shorter sequences or fewer soft targets")


def _snapshot_bytes(weights: Trainable) -> int:
    """The weights as they are published, their blob, and the small pass of the probe."""
    decoder = weights.decoder
    numbers = weights.masters.numel() if weights.spec.rank else sum(parameter.numel() for parameter in decoder.parameters())
    length = len(probe_tokens(decoder.config.vocab_size, decoder.config.context))
    probe = _trunk_bytes([length], decoder.config, decoder.dtype, exact=True, backward=False, device=decoder.device)
    return 2 * (numbers * decoder.dtype.itemsize + _largest(weights)) + probe


def _largest(weights: Trainable) -> int:
    """Bytes of the largest trained tensor."""
    return max(slot.shape.numel() for slot in weights.slots) * weights.masters.itemsize


def opening_need(spec: LoraSpec, decoder: Decoder) -> Need:
    """What a run takes to be held, beside the base model and the activations of its operations."""
    if spec.rank:
        return Need(adapter_bytes(spec, decoder), decoder.device, f"a run of rank {spec.rank}", "give it a lower rank or fewer parts of the model")
    counts = count_parts(decoder)
    trained = sum(counts.get(part, 0) for part in trained_parts(spec))
    what = f"a run that trains {trained} parameters (rank 0)"
    return Need(full_run_bytes(trained), decoder.device, what, "train an adapter (rank 1 or more) or fewer parts of the model")


def adapter_bytes(spec: LoraSpec, decoder: Decoder) -> int:
    """Upper bound of what a run holds beside the base model: masters, gradients, moments, what the forward computes with, and a checkpoint."""
    targets = adapter_targets(decoder.config, attention=spec.train_attn, mlp=spec.train_mlp, unembed=spec.train_unembed).values()
    inputs = sum(max(target.experts, 1) * target.inputs for target in targets)
    outputs = sum(max(target.experts, 1) * target.outputs for target in targets)
    fused = padded_rank(spec.rank) * (inputs + _JOINED * outputs)
    return spec.rank * (inputs + outputs) * (HELD_BYTES + CHECKPOINT_BYTES) + 2 * fused * decoder.dtype.itemsize


def pass_bytes(data: Sequence[Datum], config: DecoderConfig, dtype: torch.dtype, *, exact: bool, backward: bool, device: torch.device = _CPU) -> int:
    """Upper bound of the activations of one micro-batch."""
    lengths = [datum.tokens.shape[0] for datum in data]
    width = max(datum.inputs[TARGETS].shape[1] if len(datum.inputs[TARGETS].shape) == 2 else 1 for datum in data)
    of_targets = _rows(lengths) * width * _BYTES_PER_TARGET
    return of_targets + _trunk_bytes(lengths, config, dtype, exact=exact, backward=backward, device=device)


def shared_pass_bytes(shares: Sequence[Share]) -> int:
    """Upper bound of what one pass over micro-batches of several runs holds: activations, and the gradients that it leaves at their copies."""
    decoder, backward = shares[0].weights.decoder, shares[0].backward
    lengths = [length for share in shares for length in share.packed.lengths]
    exact = any(share.exact for share in shares)
    of_targets = sum(share.packed.targets_RK.numel() for share in shares) * _BYTES_PER_TARGET
    of_gradients = sum(share.weights.backward_bytes for share in shares) * backward
    return of_targets + of_gradients + _trunk_bytes(lengths, decoder.config, decoder.dtype, exact=exact, backward=backward, device=decoder.device)


def _rows(lengths: Sequence[int]) -> int:
    return sum(pad_to(length, ROW_PAD) for length in lengths)


def _trunk_bytes(lengths: Sequence[int], config: DecoderConfig, dtype: torch.dtype, *, exact: bool, backward: bool, device: torch.device) -> int:
    """Of everything but the predictions."""
    rows = _rows(lengths)
    layers = [_layer_floats(config, layer) for layer in range(config.num_layers)]
    held = rows * ((sum(layers) if backward else max(layers)) + 6 * config.hidden_size + 4 * _inner(config))
    of_states = _state_bytes(lengths, config.recurrent, len(config.state_layers) if backward else 1) if config.recurrent is not None else 0
    native_attention = all(attention.attends_heads(heads.head_dim, dtype, device) for heads in _attending(config))
    of_attention = _window_floats(lengths, config) * backward if native_attention else _attention_floats(lengths, config, exact)
    floats = held + of_attention
    of_gradients = split_gemm.room_bytes() if backward and dtype == torch.float32 and device == _CPU else 0
    return floats * dtype.itemsize + of_states + _HEAD_BYTES + of_gradients


def _layer_floats(config: DecoderConfig, layer: int) -> int:
    """Per row of a block: residual and norms, query, key and value before and after norm, rotation and regrouping, and the MLP."""
    held, mixer = 6 * config.hidden_size + _particulars(config), config.mixer(layer)
    if mixer == "attention":
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        gates = 4 * query * config.attention_gate
        held += int((query + 2 * key) * (1 + _PLACES) + 2 * (query + key) + query * (1 + _PLACES)) + gates
    if mixer == "recurrent" and config.recurrent is not None:
        held += 3 * config.recurrent.projection_width
    return held + 4 * _inner(config) * config.has_mlp(layer)


def _state_bytes(lengths: Sequence[int], recurrent: RecurrentConfig, layers: int) -> int:
    """What mixers with a state hold of whole chunks in float32, whatever the dtype is, and what one of them needs while it computes."""
    between = recurrent.heads * recurrent.chunk_rows
    held = 9 * recurrent.channels + 7 * between + 2 * math.prod(recurrent.state_shape) // recurrent.chunk_rows
    passing = 6 * recurrent.channels + 8 * between
    return sum(pad_to(length, recurrent.chunk_rows) for length in lengths) * (layers * held + passing) * torch.float32.itemsize


def _particulars(config: DecoderConfig) -> int:
    """What some families hold beside: norms behind attention and MLP, the layer's factor, latents, per-layer inputs."""
    held = 4 * config.hidden_size * config.sandwich_norms + config.hidden_size * config.layer_scale
    if config.latent is not None:
        held += 3 * ((config.latent.query_rank or 0) + config.latent.key_rank + config.latent.rope_dim)
    if config.per_layer is not None:
        held += 3 * config.hidden_size + 8 * config.per_layer.width
    return held


def _inner(config: DecoderConfig) -> int:
    experts = config.experts
    return max(config.intermediate_size, 0 if experts is None else experts.top_k * experts.intermediate_size + experts.shared_size)


def _attending(config: DecoderConfig) -> list[LayerHeads]:
    return [config.heads(layer) for layer in range(config.num_layers) if config.mixer(layer) == "attention"]


def _window_floats(lengths: Sequence[int], config: DecoderConfig) -> int:
    """Masks of windows, which native kernels need in the backward alone."""
    return sum(length * length for length in {pad_to(length, LENGTH_PAD) for length in lengths}) * len(set(config.windows) - {None})


def _attention_floats(lengths: Sequence[int], config: DecoderConfig, exact: bool) -> int:
    """Masks, one per padded length and window, and the padded keys and values of the longest."""
    windows = set(config.windows) - {None}
    if not exact and not windows:
        return 0
    masks = {pad_to(length, LENGTH_PAD) for length in lengths}
    mask_floats = sum(2 * length * pad_to(length, KEY_PAD) for length in masks) * len(set(config.windows))
    return mask_floats + 4 * config.num_kv_heads * config.head_dim * sum(pad_to(length, KEY_PAD) for length in lengths)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
