"""The trainer's side of fidelity cards, which the api asks an engine for: a pass at a time, between those of training."""

from collections import deque
from collections.abc import Callable, Generator

from bloomery.engine.shelf import BlobShelf
from bloomery.infer.card import card
from bloomery.infer.fidelity import trainer_passes
from bloomery.models.decoder import Decoder
from bloomery.models.form import Form
from bloomery.models.memory import free_bytes
from bloomery.types.errors import BloomeryError, Unavailable, WorkerError, blame
from bloomery.types.protocol import Compare, Compared
from bloomery.types.resources import Fidelity


class Comparisons:
    """What was asked and not answered; `form` is that of the sampler in this process, and `give_back` is called where memory is lacking."""

    def __init__(
        self, shelf: BlobShelf, decoder: Decoder, form: Form, send: Callable[[Compared], None], give_back: Callable[[], None] = lambda: None
    ) -> None:
        self._shelf, self._decoder, self._form, self._send, self._give_back = shelf, decoder, form, send, give_back
        self._orders: deque[Compare] = deque()
        self._work: Generator[None, None, Fidelity] | None = None
        """Of the first order, when it was begun."""

    @property
    def waiting(self) -> int:
        """Cards that are to be made."""
        return len(self._orders)

    def add(self, order: Compare) -> None:
        """Queue it."""
        self._orders.append(order)

    def forget_all(self) -> None:
        """Nobody listens any more."""
        self._orders.clear()
        self._work = None

    def take_turn(self) -> None:
        """One pass of the first card; what goes wrong is said in its place."""
        if not self._orders:
            return
        order = self._orders[0]
        if self._work is None:
            self._work = self._compare(order)
        try:
            with blame(WorkerError, f"cannot compare version {order.weights.version}"):
                try:
                    next(self._work)
                    return
                except StopIteration as done:
                    answer = Compared(request_id=order.request_id, card=done.value.model_dump_json().encode())
        except BloomeryError as error:
            answer = Compared(request_id=order.request_id, error=error.message, code=error.code)
        self._orders.popleft()
        self._work = None
        self._send(answer)

    def _compare(self, order: Compare) -> Generator[None, None, Fidelity]:
        needs, device = 2 * self._shelf.weigh(order.weights), self._decoder.device
        if needs > free_bytes(device):
            self._give_back()
        if needs > (free := free_bytes(device)):
            raise Unavailable(f"version {order.weights.version} takes {needs} bytes of memory to compare, {free} are free: give the engine more")
        model = self._shelf.load(order.weights)
        logprobs = []
        for part in trainer_passes(model, order.answers):
            logprobs += part
            yield
        return card(model, model, order.answers, logprobs, order.mode, self._form)
