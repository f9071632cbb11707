"""The form in which a sampler computes: whether its bits are the trainer's, and the pads, the order of weights and the threads that it uses for that.

`kernel_probe` finds the fastest exact one for this machine and model; `plain_form` is the fastest of all.
"""

from typing import Final, NamedTuple

from bloomery.models.decoder import Decoder
from bloomery.models.pads import KEY_PAD, ROW_PAD
from bloomery.models.products import can_pack

_PLAIN_KEY_PAD: Final = 32


class Form(NamedTuple):
    """How the sampler lays out what it computes. The default has the trainer's bits wherever `kernel_probe` finds this machine bit-exact."""

    exact: bool = True
    """A row's bits do not depend on its company."""
    row_pad: int = ROW_PAD
    """Rows of each adapter, and of a step, come in multiples of this."""
    key_pads: tuple[int, ...] = (KEY_PAD,)
    """Numbers of keys that attention may look at behind the last multiple of `KEY_PAD`, ascending; the last is `KEY_PAD`."""
    packed: bool = False
    """Whether the weights of products are kept in their kernel's own order."""
    one_thread: bool = True
    """Whether one thread may compute a step: it gives the bits of all of them."""

    def keys(self, length: int) -> int:
        """The least number of keys to attend to that holds `length`."""
        whole, rest = length // KEY_PAD * KEY_PAD, length % KEY_PAD
        return whole + next(pad for pad in self.key_pads if pad >= rest) if rest else whole


def plain_form(decoder: Decoder) -> Form:
    """The fastest form, whose bits depend on the company."""
    pads = range(_PLAIN_KEY_PAD, KEY_PAD + 1, _PLAIN_KEY_PAD)
    return Form(exact=False, row_pad=1, key_pads=tuple(pads), packed=can_pack(decoder.dtype, decoder.device))
