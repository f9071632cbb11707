"""What a process proves before it takes traffic: that its base model is in memory as its files have it, and that it answers as the trainer would.

`prove_base` holds the live tensors against the root of the base, plain and packed. Then the sampler answers a prompt (`infer/probe_prompt`).
"""

from collections.abc import Sequence

from bloomery.infer.probe_prompt import Probed
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.sync.proof import Expected, Proof, prove
from bloomery.types.errors import Corrupt
from bloomery.types.protocol import Proved


def prove_base(known: Expected, sampler: Sampler, decoder: Decoder, *, trains: bool) -> list[Proof]:
    """In every form in which this process computes with the base: training with the plain one, where it `trains`, sampling with the packed."""
    computed = sampler.computed_with(decoder)
    try:
        return [prove(known, each, None) for each in ([decoder, computed] if trains and computed is not decoder else [computed])]
    except Corrupt as error:
        advice = "start again; if it stays so, restore the model's files, or delete its document under bases/ in the data directory"
        raise Corrupt(f"{error.message}; {advice}") from error


def proved(proofs: Sequence[Proof], probe: Probed) -> Proved:
    """For whoever connects."""
    return Proved(
        root=proofs[0].root,
        elements=proofs[0].numel,
        seconds=sum(proof.seconds for proof in proofs),
        probe_tokens=probe.tokens,
        probe_max_abs=probe.max_abs,
        probe_bit_equal=probe.bit_equal,
    )
