"""What the trainer's forward says of the probe (`types/probe`), with the weights that a run has at the moment."""

from typing import Final

import numpy as np

from bloomery.train import batch
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.train.trainable import Trainable
from bloomery.types.arrays import Array
from bloomery.types.operations import Datum
from bloomery.types.probe import TrainerSide, logprob_bytes, probe_tokens

_LOSS: Final = "cross_entropy"


def answer_probe(weights: Trainable) -> TrainerSide:
    """From one small pass without a backward; gradients that were gathered stay as they are."""
    config = weights.decoder.config
    asked = probe_tokens(config.vocab_size, config.context)
    tokens = np.array(asked)
    inputs = {"target_tokens": Array.of(tokens[1:].astype(np.int64)), "weights": Array.of(np.ones(len(tokens) - 1, np.float32))}
    datum, loss = Datum(tokens=Array.of(tokens[:-1].astype(np.int32)), inputs=inputs), find_loss(_LOSS, {})
    (computed,) = compute([Share(weights, batch.pack([datum], loss), loss, backward=False)])
    return TrainerSide(asked, logprob_bytes(batch.unpack(computed.logprobs_RK, [datum])[0]))
