"""Weights in the order that oneDNN multiplies them in, for as long as they are sampled with.

Whoever loads weights packs them too, beside the sampler, so that no step waits for it. The plain matrices stay: the base model is trained on, and
other weights may be made of any. So a packed model takes about twice its memory.
"""

from weakref import WeakKeyDictionary

from bloomery.infer.versions import Model, Source
from bloomery.models.decoder import Decoder
from bloomery.models.packed import pack, packed_bytes
from bloomery.types.generation import Weights


class Packing:
    """A source of weights that packs what it loads."""

    def __init__(self, source: Source, base: Decoder) -> None:
        self._source = source
        self._twins: WeakKeyDictionary[Decoder, Decoder] = WeakKeyDictionary()
        self._whole_bytes, self._twin_bytes = sum(parameter.nbytes for parameter in base.parameters()), packed_bytes(base)
        self.twin(base)

    def weigh(self, weights: Weights) -> int:
        """As the source says, and the packed matrices of a whole model."""
        needs = self._source.weigh(weights)
        return needs + self._twin_bytes if needs >= self._whole_bytes else needs

    def load(self, weights: Weights) -> Model:
        """The source's model, packed by the time it is there."""
        model = self._source.load(weights)
        self.twin(model.decoder)
        return model

    def twin(self, decoder: Decoder) -> Decoder:
        """The packed form of a decoder, which is made when it is missing and goes when the decoder goes."""
        if (twin := self._twins.get(decoder)) is None:
            twin = self._twins[decoder] = pack(decoder)
        return twin
