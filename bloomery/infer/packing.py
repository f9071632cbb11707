"""Weights in the order that their kernel multiplies them in, for as long as they are sampled with.

Whoever loads weights packs them too, beside the sampler, so that no step waits for it. Where the base model is trained on, or other weights are made
of those in memory, the plain matrices stay, and a packed model takes about twice its memory; a process that only samples lets go of them.
"""

from weakref import WeakKeyDictionary

from bloomery.infer.versions import Model, Source
from bloomery.models.decoder import Decoder
from bloomery.models.packed import is_packed, pack, pack_in_place, packed_bytes
from bloomery.sync.proof import prove
from bloomery.types.generation import Weights


class Packing:
    """A source of weights that packs what it loads; in place, where nothing but the sampler reads them."""

    def __init__(self, source: Source, base: Decoder, *, in_place: bool = False) -> None:
        self._source, self._in_place = source, in_place
        self._twins: WeakKeyDictionary[Decoder, Decoder] = WeakKeyDictionary()
        self._whole_bytes = sum(parameter.nbytes for parameter in base.parameters())
        # In place only a head is added to what there was, where the embedding is one too.
        self._added_bytes = base.head_weight.nbytes * base.config.tied_head if in_place else packed_bytes(base)
        self.twin(base)

    def weigh(self, weights: Weights) -> int:
        """As the source says, and what packing adds to a whole model."""
        needs = self._source.weigh(weights)
        return needs + self._added_bytes if needs >= self._whole_bytes else needs

    def load(self, weights: Weights) -> Model:
        """The source's model, packed by the time it is there."""
        model = self._source.load(weights)
        # By a source that packs first, which has then proved the packed matrices.
        already = is_packed(model.decoder)
        twin = self.twin(model.decoder)
        if model.proof is None or model.adapter is not None or already:
            return model
        # The packed matrices are what it is sampled with.
        return model._replace(proof=prove(model.proof.expected, twin, None))

    def twin(self, decoder: Decoder) -> Decoder:
        """The packed form of a decoder, which is made when it is missing: itself, or one that goes when the decoder goes."""
        if self._in_place:
            if not is_packed(decoder):
                pack_in_place(decoder)
            return decoder
        if (twin := self._twins.get(decoder)) is None:
            twin = self._twins[decoder] = pack(decoder)
        return twin
