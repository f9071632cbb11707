"""Who works beside others rests between the pieces of the work, and nobody else does."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch

from bloomery.infer.engine import Patch
from bloomery.infer.probe import Probation
from bloomery.infer.staging import Staging, checksum
from bloomery.infer.versions import Model
from bloomery.models.form import plain_form
from bloomery.models.load import stored_tensors
from bloomery.models.packed import pack
from bloomery.models.pieces import in_pieces
from bloomery.models.products import can_pack
from bloomery.models.rests import rest, resting
from bloomery.sync.live import adapter_views
from bloomery.sync.proof import as_it_is
from tests.infer.builders import adapter
from tests.train.builders import decoder


class Others:
    """Are asked whether they are busy whenever a piece was long enough."""

    def __init__(self, *, busy: bool = False) -> None:
        self.asked, self._busy = 0, busy

    def busy(self) -> bool:
        self.asked += 1
        return self._busy

    def asked_in(self, work: Callable[[], object]) -> int:
        before = self.asked
        work()
        return self.asked - before


def test_a_piece_that_was_long_enough_ends_with_a_rest_and_a_short_one_does_not():
    others = Others(busy=True)
    with resting(others.busy, piece_s=0):
        assert others.asked_in(rest) == 1
    with resting(others.busy, piece_s=3600):
        assert others.asked_in(rest) == 0


def test_nobody_rests_but_the_thread_that_said_so_and_for_as_long_as_it_said():
    others, inner = Others(), Others()

    def elsewhere() -> None:
        thread = Thread(target=rest)
        thread.start()
        thread.join()

    with resting(others.busy, piece_s=0):
        assert others.asked_in(elsewhere) == 0
        with resting(inner.busy, piece_s=0):
            assert (others.asked_in(rest), inner.asked) == (0, 1)
        assert others.asked_in(rest) == 1
    assert others.asked_in(rest) == 0


def test_new_weights_are_copied_changed_packed_proved_and_summed_with_a_rest_for_every_tensor():
    base, others = decoder(), Others()
    tensors = stored_tensors(base)
    update = {name: Patch(torch.tensor([0]), torch.ones(1), tuple(tensor.shape)) for name, tensor in tensors.items()}
    with resting(others.busy, piece_s=0):
        begun: list[Staging] = []
        assert others.asked_in(lambda: begun.append(Staging(Model("base", base, None, as_it_is("base", base)), "new"))) > len(list(base.parameters()))
        (staging,) = begun
        assert others.asked_in(lambda: staging.apply(update)) == 2 * len(update)
        assert others.asked_in(lambda: staging.prove(lambda plain: plain)) >= len(tensors)
        pieces = list(in_pieces([tensors[name] for name in sorted(tensors)]))
        assert others.asked_in(lambda: checksum(staging.model())) == len(pieces) > 1


def test_an_adapter_is_copied_changed_proved_and_probed_with_a_rest_before_and_after_whatever_takes_long():
    base, others = decoder(), Others()
    held = Model("held", base, adapter(base, 1))
    tensors = {name: view.values.clone() for name, view in adapter_views(adapter(base, 2)).items()}
    patches = {name: Patch(torch.tensor([0]), torch.ones(1), tuple(tensor.shape)) for name, tensor in tensors.items()}
    probation = Probation(Model("base", base, None), plain_form(base), lambda plain: plain, exact=False)
    with resting(others.busy, piece_s=0):
        begun: list[Staging] = []
        assert others.asked_in(lambda: begun.append(Staging(held, "new"))) > 1
        (staging,) = begun
        assert others.asked_in(lambda: staging.apply(tensors)) > len(tensors)
        assert others.asked_in(lambda: staging.apply(patches)) == 2 * len(patches)
        assert others.asked_in(lambda: staging.prove(lambda plain: plain)) > 1
        # Both sides of the probe, one layer after the other.
        assert others.asked_in(lambda: staging.ask_probe(probation.examine)) > 2 * len(base.layers)
        assert others.asked_in(lambda: checksum(staging.model())) >= 1


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="nothing is packed here")
def test_a_model_is_packed_with_a_rest_for_every_matrix():
    base, others = decoder(), Others()
    with resting(others.busy, piece_s=0):
        assert others.asked_in(lambda: pack(base)) > 4 * len(base.layers)
