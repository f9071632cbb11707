"""Whether a row's result is independent of its batch here.

The pads (`ROW_PAD`, `KEY_PAD`) were found by measurement on other machines; `probe` holds them against this machine's kernels, with this model's
shapes. It also chooses the `Form` in which the sampler computes: what is faster and gives the trainer's bits here. One module per kind of kernel:
`products`, `attention`, `recurrent` and `pointwise`, each of which tries few rows and many, and one thread and all; `inputs` is what they try.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.kernel_probe import attention, pointwise, products, recurrent
from bloomery.models.kernel_probe.inputs import FEW_ROWS
from bloomery.models.pads import ROW_PAD
from bloomery.models.threads import one_thread


class ProbeReport(NamedTuple):
    """`bit_exact`: trainer and sampler agree to the bit here; otherwise `failures` names the kernels that depend on their batch."""

    bit_exact: bool
    failures: tuple[str, ...]
    form: Form
    """The fastest one with the trainer's bits."""


def probe(decoder: Decoder) -> ProbeReport:
    """Compare each kind of kernel on few rows and on many, with this model's shapes; takes well under a second for small models."""
    with torch.no_grad():
        found = products.examine(decoder)
        failures = (*found.failures, *attention.failures(decoder), *recurrent.failures(decoder), *pointwise.failures(decoder))
        row_pad = 1 if found.padless and not any(pointwise.failures(decoder, FEW_ROWS)) else ROW_PAD
        alone = found.one_thread and _equal_alone(decoder)
        form = Form(row_pad=row_pad, key_pads=attention.key_pads(decoder), packed=found.packs, one_thread=alone)
    return ProbeReport(not failures, failures, form)


def _equal_alone(decoder: Decoder) -> bool:
    """Whether all but products has the same bits from one thread as from all."""
    together = list(_answers(decoder))
    with one_thread():
        return all(torch.equal(mine, theirs) for mine, theirs in zip(_answers(decoder), together, strict=True))


def _answers(decoder: Decoder) -> Iterator[Tensor]:
    yield from attention.answers(decoder)
    yield from recurrent.answers(decoder)
    yield from pointwise.answers(decoder)
