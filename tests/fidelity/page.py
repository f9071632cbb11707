"""docs/fidelity.md: the cards of the shipped model and of a trained instance of every architecture, and what planted bugs do to them.

python -m tests.fidelity.page    # `make fidelity`: trains and measures everything, some minutes
"""

import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from bloomery.fidelity.cards import examine
from bloomery.infer.card import card, measure
from bloomery.infer.fidelity import sample, trainer_logprobs
from bloomery.models.families import FAMILIES
from bloomery.models.form import plain_form
from bloomery.models.kernel_probe import probe
from bloomery.types.fidelity import PLAIN_K3, Sampled, compare
from bloomery.types.resources import Fidelity
from tests.fidelity.instances import MAX_TOKENS, STEPS, Instance, as_state, asked, trained
from tests.fidelity.mutations import MUTATIONS
from tests.models.builders import reference

PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "fidelity.md"
_TEXT: Final = Path(__file__).parent / "page.md"
DTYPES: Final = (torch.float32, torch.bfloat16)


def main() -> None:
    """Measure, and write the page."""
    torch.set_num_threads(1)
    cards = "\n".join([*_shipped(), *_architectures()])
    found = {"CARDS": cards, "BUGS": "\n".join(_bugs()), "STEPS": str(STEPS), "BAR": f"{PLAIN_K3:g}"}
    found["WHERE"] = f"{_processor()}, torch {torch.__version__}, one thread, {datetime.now(UTC):%Y-%m-%d}"
    text = _TEXT.read_text()
    for name, value in found.items():
        text = text.replace(f"{{{name}}}", value)
    PAGE.write_text(text)


def _shipped() -> Iterator[str]:
    for dtype in ("float32", "bfloat16"):
        cards = [next(examine([], dtype, 1, MAX_TOKENS, plain=plain)) for plain in (False, True)]
        yield _line(f"{cards[0].model} ({cards[0].architecture})", *(report.card for report in cards), "")


def _architectures() -> Iterator[str]:
    for family in FAMILIES:
        for dtype in DTYPES:
            instance = trained(family, dtype)
            model, form = instance.model, probe(instance.decoder).form
            answers = sample(model, asked(), MAX_TOKENS, form)
            theirs = compare(answers, reference_logprobs(family, instance, answers))
            plain = measure(model, model, asked(), MAX_TOKENS, "plain", plain_form(instance.decoder))
            print(family, dtype, flush=True)
            yield _line(family, card(model, model, answers, trainer_logprobs(model, answers), "exact", form), plain, f"{theirs.k3:.1e}")


def _line(name: str, exact: Fidelity, plain: Fidelity, theirs: str) -> str:
    numbers = f"{exact.k3:g} | {exact.max_abs:g} | {exact.bit_equal:.0%} | {exact.verdict} | {plain.k3:.1e} | {plain.bit_equal:.0%} | {plain.verdict}"
    return f"| {name} | {exact.dtype} | {exact.tokens} | {numbers} | {theirs} |"


def _bugs() -> Iterator[str]:
    for mutation in MUTATIONS:
        right = mutation.model()
        found = measure(right, mutation.sampler(right), asked(), MAX_TOKENS, "exact")
        place = str(found.first_difference).partition(",from")[0].partition(", from")[0]
        caught = "both" if found.k3 > PLAIN_K3 else "exact"
        print(mutation.bug, found.k3, flush=True)
        yield f"| {mutation.bug} | {mutation.architecture} | {found.k3:.1e} | {found.max_abs:.1e} | {place} | {caught} |"


def reference_logprobs(family: str, instance: Instance, answers: Sequence[Sampled]) -> list[NDArray[np.float32]]:
    """What `transformers` says of the sampled tokens, with the same weights in the same dtype."""
    kind = type(reference(family))
    with tempfile.TemporaryDirectory() as directory:
        save_file(as_state(instance.decoder), Path(directory) / "model.safetensors", {"format": "pt"})
        # `transformers` runs Kimi K2 as DeepSeek V3, and has no name of its own for it.
        renamed = {"model_type": "deepseek_v3"} if family == "kimi_k2" else {}
        (Path(directory) / "config.json").write_text(json.dumps(instance.config | renamed))
        model = kind.from_pretrained(directory, dtype=instance.decoder.dtype)
    found = []
    with torch.no_grad():
        for each in answers:
            tokens = torch.tensor(each.tokens)
            logprobs_TV = model(tokens[None]).logits[0].float().log_softmax(-1)
            first = len(each.prompt)
            found.append(logprobs_TV[first - 1 : -1].gather(1, tokens[first:, None])[:, 0].numpy())
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
