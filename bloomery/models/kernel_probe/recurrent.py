"""Layers with a state: whether a chunk has its bits beside any others, and its rows theirs before any others.

Shapes: N chunks, L rows of a chunk with those before it, X scan inputs of a row, T rows of a chunk, I numbers that a row reads.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe.inputs import noise
from bloomery.models.recurrent import Recurrence

_CHUNK_COUNTS: Final = (1, 2, 5, 12)
"""Chunks of sequences that are computed together."""


def failures(decoder: Decoder) -> Iterator[str]:
    """Chunks and rows whose bits depend on others."""
    if (mixer := recurrence(decoder)) is None:
        return
    config, (rows_NLX, state_N) = mixer.config, _chunks(mixer, decoder)
    whole = mixer.inter_chunk(mixer.intra_chunk(rows_NLX), state_N, len(state_N))
    for count in _CHUNK_COUNTS:
        few = mixer.inter_chunk(mixer.intra_chunk(rows_NLX[:count]), state_N[:count], count)
        if not all(torch.equal(mine, theirs[:count]) for mine, theirs in zip(few, whole, strict=True)):
            yield f"{count} chunks of {config.chunk_rows} rows differ from those among {len(state_N)}"
    for known in (1, config.chunk_rows // 3, config.chunk_rows - 1):
        unfinished_NLX = rows_NLX.clone()
        unfinished_NLX[:, config.conv_width - 1 + known :] = 0
        begun_NTI = mixer.inter_chunk(mixer.intra_chunk(unfinished_NLX), state_N, 0).read_NTI
        if not torch.equal(begun_NTI[:, :known], whole.read_NTI[:, :known]):
            yield f"the first {known} rows of a chunk depend on those behind them"


def answers(decoder: Decoder) -> Iterator[Tensor]:
    """Of one chunk and of many."""
    if (mixer := recurrence(decoder)) is None:
        return
    rows_NLX, state_N = _chunks(mixer, decoder)
    for count in (1, len(state_N)):
        yield from mixer.inter_chunk(mixer.intra_chunk(rows_NLX[:count]), state_N[:count], count)


def recurrence(decoder: Decoder) -> Recurrence | None:
    """The first of a model's mixers with a state: all have one shape."""
    return next((module for module in decoder.modules() if isinstance(module, Recurrence)), None)


def _chunks(mixer: Recurrence, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Rows of many chunks with those before them, and states."""
    config, most = mixer.config, max(_CHUNK_COUNTS)
    rows_NLX = noise(most, config.conv_width - 1 + config.chunk_rows, config.row_width, like=decoder.norm)
    return rows_NLX, noise(most, *config.state_shape, like=decoder.norm, seed=1).float()
