"""The cards of models on this machine, sampler against trainer in one process."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bloomery.infer.card import measure
from bloomery.infer.versions import Model
from bloomery.models.form import plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.obs.machine import free_memory_bytes, usable_cpus
from bloomery.render.tokenizer import ChatTokenizer
from bloomery.types.fidelity import TEXT_TOKENS, Mode, prompts
from bloomery.types.fidelity_text import TEXT
from bloomery.types.resources import Fidelity
from bloomery.up import base_models
from bloomery.up.base_models import ModelArgument


class Report(NamedTuple):
    """The card of one model."""

    model: str
    architecture: str
    card: Fidelity


def examine(models: Sequence[str], dtype: str, threads: int | None, max_tokens: int, *, plain: bool) -> Iterator[Report]:
    """Measure one model after the other: directories or known names, without any the shipped one."""
    torch.set_num_threads(threads or usable_cpus())
    for argument in base_models.model_arguments(models):
        base_models.refuse_what_does_not_fit([base_models.check(argument, dtype)], dtype, free_memory_bytes())
        yield _report(argument, dtype, max_tokens, plain=plain)


def _report(argument: ModelArgument, dtype: str, max_tokens: int, *, plain: bool) -> Report:
    decoder = load_decoder(argument.directory, dtype=getattr(torch, dtype))
    tokenizer = ChatTokenizer.load(argument.directory)
    try:
        asked = prompts(tokenizer.encode(TEXT)[:TEXT_TOKENS], decoder.config.context, max_tokens)
    finally:
        tokenizer.close()
    model = Model(argument.alias, decoder, None)
    probed = probe(decoder)
    form = plain_form(decoder) if plain else probed.form
    # Where kernels depend on the batch nobody promises equal bits.
    mode: Mode = "exact" if probed.bit_exact and form.exact else "plain"
    return Report(argument.alias, decoder.config.model_type, measure(model, model, asked, max_tokens, mode, form))
