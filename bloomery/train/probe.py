"""What the trainer's forward says of the probe (`types/probe`), with the weights that a run has at the moment.

Of a small model such a pass takes as long between its kernels as in them, and a loop that serves every step waits for one in each. So a run that is
asked again and again answers by a program (`models/program`) of its own forward: the same kernels, with the run's own weights where they lie.
Shapes: R packed rows, D hidden.
"""

import logging
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder, Inputs
from bloomery.models.head import token_logprobs
from bloomery.models.native import bindings, gemm
from bloomery.models.program import Program, Recorder, Workspace
from bloomery.models.targets import UNEMBED
from bloomery.train import batch
from bloomery.train.batch import MicroBatch
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.train.trainable import Trainable
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum
from bloomery.types.probe import TrainerSide, logprob_bytes, probe_tokens

log = logging.getLogger(__name__)

_LOSS: Final = "cross_entropy"


def answer_probe(weights: Trainable) -> TrainerSide:
    """From one small pass of training without a backward; gradients that were gathered stay as they are."""
    datum, loss = _datum(weights.decoder), find_loss(_LOSS, {})
    (computed,) = compute([Share(weights, batch.pack([datum], loss), loss, backward=False)])
    return _side(weights.decoder, batch.unpack(computed.logprobs_RK, [datum])[0])


class Answerer:
    """Answers for one run: twice by a pass of training, then by a program too, which has to give the same bits, and from then on by that alone."""

    def __init__(self, weights: Trainable) -> None:
        self._weights = weights
        self._lay: _Places | None = None
        """Where everything was when it was asked last."""
        self._recorded: _Recorded | None = None
        # Whoever makes another class of it may do more than compute.
        self._records = type(weights.decoder) is Decoder and gemm.multiplies(weights.decoder.embedding)
        """Unless something was found that no program computes."""

    def answer(self) -> TrainerSide:
        """With the weights of now."""
        lay, self._lay = self._lay, _places(self._weights)
        if not self._records or lay != self._lay:
            self._recorded = None
            return answer_probe(self._weights)
        if self._recorded is None:
            self._recorded = _record(self._weights)
            self._records = self._recorded is not None
            return answer_probe(self._weights)
        found = self._recorded.answer(self._weights)
        if self._recorded.proved:
            return found
        told = answer_probe(self._weights)
        self._records = found == told
        self._recorded = self._recorded._replace(proved=True) if self._records else None
        if not self._records:
            log.error("a program gave other bits than the pass that it is for: this run answers its probe call by call")
        return told


class _Places(NamedTuple):
    """All that the calls of a program take for granted."""

    addresses: tuple[int, ...]
    """Of the decoder's tensors and the adapter's."""
    threads: int


def _places(weights: Trainable) -> _Places:
    decoder, adapter = weights.decoder, weights.fused()
    tensors = chain(decoder.parameters(), decoder.buffers(), () if adapter is None else adapter.tensors)
    return _Places(tuple(tensor.data_ptr() for tensor in tensors), torch.get_num_threads())


class _Recorded(NamedTuple):
    """The forward of the probe up to the head, and all the memory that it names beside the weights."""

    datum: Datum
    packed: MicroBatch
    inputs: Inputs
    attention: PackedAttention
    workspace: Workspace
    program: Program
    hidden_RD: Tensor
    """Where the program leaves what it gives."""
    proved: bool = False

    @torch.no_grad()
    def answer(self, weights: Trainable) -> TrainerSide:
        """With the weights of now, which lie where they lay."""
        decoder, adapter = weights.decoder, weights.fused()
        self.inputs.take_over(decoder.inputs(self.packed.tokens_R, self.packed.positions_R))
        self.program.run(bindings.run)
        factors = None if adapter is None else adapter.get(UNEMBED)
        logprobs_RK = token_logprobs(self.hidden_RD, decoder.head_weight, factors, self.packed.targets_RK, decoder.config.logit_softcap)
        return _side(decoder, batch.unpack(logprobs_RK, [self.datum])[0])


@torch.no_grad()
def _record(weights: Trainable) -> _Recorded | None:
    """None where it has something in it that no program computes."""
    decoder, datum, workspace = weights.decoder, _datum(weights.decoder), Workspace()
    packed = batch.pack([datum], find_loss(_LOSS, {}))
    inputs, attention = decoder.inputs(packed.tokens_R, packed.positions_R), PackedAttention(packed.lengths, exact=True)
    adapters = AdapterRows(((weights.fused(), 0, len(packed.tokens_R)),))
    with Recorder(workspace) as recorder:
        hidden_RD = decoder.hidden_of(inputs, attention, adapters)
    if recorder.refused is not None:
        log.info("a run answers its probe call by call: no program computes %s", recorder.refused)
        return None
    return _Recorded(datum, packed, inputs, attention, workspace, Program(recorder.calls), hidden_RD)


def _datum(decoder: Decoder) -> Datum:
    tokens = np.array(_asked(decoder))
    inputs = {"target_tokens": Array.of(tokens[1:].astype(np.int64)), "weights": Array.of(np.ones(len(tokens) - 1, np.float32))}
    return Datum(tokens=Array.of(tokens[:-1].astype(np.int32)), inputs=inputs)


def _side(decoder: Decoder, logprobs: np.ndarray) -> TrainerSide:
    return TrainerSide(_asked(decoder), logprob_bytes(logprobs))


def _asked(decoder: Decoder) -> tuple[int, ...]:
    return probe_tokens(decoder.config.vocab_size, decoder.config.context)
