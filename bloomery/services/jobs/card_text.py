"""A model card as Markdown, with the front matter of Hugging Face's."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import yaml

from bloomery.types.jobs import Compared
from bloomery.types.methods import Reinforcement
from bloomery.types.model_cards import Ancestor, GradedBy, ModelCard


def markdown(card: ModelCard) -> str:
    """The card, for people and for hubs."""
    name = card.job or f"{card.base_model}, version {card.version[:12]}"
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(card), sort_keys=False)}---",
        f"# {name}",
        _table(("", ""), _identity(card)),
        *_training(card),
        *_graded("What it was rewarded by", card.rewarded_by),
        *_graded("What else scored its answers, held out of training", card.held_out_by),
        *_comparison(card),
        *_fidelity(card),
        "## Not measured, not known",
        "\n".join(f"- {each}" for each in card.not_measured),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(card: ModelCard) -> dict[str, Any]:
    adapter = card.kind == "lora"
    method = [] if card.spec is None else [card.spec.method.kind]
    known: dict[str, Any] = {"license": "unknown", "base_model": card.base_model, "base_model_relation": "adapter" if adapter else "finetune"}
    if card.spec is not None:
        known["datasets"] = [card.spec.data.dataset]
    return known | {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["bloomery", *method, *(["lora"] if adapter else [])],
    }


def _identity(card: ModelCard) -> list[tuple[str, str]]:
    weights = f"adapter of rank {card.rank}, alpha {card.alpha:g}, of {', '.join(card.targets)}" if card.kind == "lora" else "all parameters"
    found = [
        ("version", f"`{card.version}`"),
        ("weights", weights),
        ("base model", f"{card.base_model} (`{card.base_hash}`)"),
        ("trained from", " → ".join([card.base_model, *map(_ancestor, card.lineage)])),
        ("run", f"`{card.run}`, step {card.step}, behind version `{card.parent}`"),
        ("numerics", f"`{card.numerics}`"),
    ]
    if card.digest is not None:
        found.append(("digest of the trained weights", f"`{card.digest}`"))
    if card.finished_us is not None:
        found.append(("finished", f"{datetime.fromtimestamp(card.finished_us / 1e6, UTC):%Y-%m-%d %H:%M} UTC"))
    return found


def _ancestor(of: Ancestor) -> str:
    where = f"checkpoint {of.checkpoint} of run `{of.run}`"
    return where if of.job is None else f"{of.job} ({of.method} on {of.dataset}, {where})"


def _training(card: ModelCard) -> list[str]:
    if card.spec is None:
        return []
    spec, data = card.spec, card.trained_on
    rows = [("method", spec.method.kind), ("data set", f"{spec.data.dataset}, split {spec.data.train}, version `{spec.data.version}`")]
    if data is not None:
        counts = ", ".join(f"{name} {count}" for name, count in data.counts.items())
        rows += [("version of the data set", f"number {data.number}, content `{data.manifest}`"), ("its rows", counts)]
    if isinstance(spec.method, Reinforcement) and spec.method.agent is not None:
        told = "" if spec.method.grader is not None else ", which says itself what each is worth"
        rows.append(("rollouts", f"of agent `{spec.method.agent}`{told}"))
    rows.append(("steps", str(card.step)))
    if card.tokens is not None and card.seconds is not None:
        rows += [("tokens through the model", str(card.tokens)), ("time of its processes", f"{card.seconds:.1f} s")]
    figures = [(figure.name, str(figure.step), _number(figure.value)) for figure in card.figures]
    # JSON is YAML, and has no line that could end a block of Markdown.
    settings = json.dumps(spec.model_dump(mode="json", exclude={"name", "metadata"}), indent=2)
    parts = ["## Training", _table(("", ""), rows)]
    if figures:
        parts += ["Measured last:", _table(("measure", "step", "value"), figures)]
    return [*parts, "All settings, as `bloomery job create NAME --file` takes them:", f"```json\n{settings}\n```"]


def _graded(title: str, found: GradedBy | None) -> list[str]:
    if found is None:
        return []
    rows = [("grader", f"{found.grader}, version {found.version} (`{found.hash}`)")]
    if found.judges:
        agree = {None: "not measured by what people say", True: "agree with people above the bar", False: "agree with people below the bar"}
        rows.append(("judges", f"{', '.join(found.judges)}: {agree[found.calibrated]}"))
    if found.verdict is not None:
        rows.append(("attacked on these prompts", f"{found.verdict}: {found.why}"))
    if found.exploits:
        rows.append(("paid without competence", ", ".join(found.exploits)))
    if found.waiver is not None:
        rows.append(("waived", f"by {found.waiver.by}: {found.waiver.reason}"))
    return [f"## {title}", _table(("", ""), rows)]


def _comparison(card: ModelCard) -> list[str]:
    if not card.compared:
        return []
    split = "" if card.spec is None else f" of `{card.spec.evaluation.split}`"
    said = f"Held-out rows{split}, answered and scored by what is served: means, and the paired difference, with 95 % intervals."
    headings = ("measure", "rows", "before", "after", "difference", "better is")
    return ["## Beside what it began with", f"{said} Before: `{card.compared_with}`.", _table(headings, map(_compared, card.compared))]


def _compared(measure: Compared) -> tuple[str, ...]:
    before = f"{_number(measure.before)}{_interval(measure.before_interval)}"
    after = f"{_number(measure.after)}{_interval(measure.after_interval)}"
    difference = f"{measure.difference:+.4g}{_interval(measure.difference_interval)}"
    return measure.name, str(measure.rows), before, after, difference, "higher" if measure.higher_is_better else "lower"


def _fidelity(card: ModelCard) -> list[str]:
    found = card.fidelity
    if found is None:
        return []
    said = "How far what the sampler says of its own tokens is from what the trainer says of them."
    rows = [
        ("verdict", f"{found.verdict} ({found.mode})"),
        ("k3", f"{found.k3:.3g}"),
        ("largest difference", f"{found.max_abs:.3g}"),
        ("mean difference", f"{found.mean_abs:.3g}"),
        ("equal bits", f"{found.bit_equal:.1%} of {found.tokens} tokens in {found.sequences} answers"),
        ("computed in", f"{found.dtype}, numerics `{found.numerics}`"),
    ]
    if found.first_difference is not None:
        rows.append(("first difference", found.first_difference))
    return ["## Fidelity", said, _table(("", ""), rows)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.4g}, {interval[1]:.4g}]"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
