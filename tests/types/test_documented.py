"""What the source says behind a field is what the published documents say of it."""

from bloomery.types.jobs import JobSpec
from bloomery.types.methods import Optimizer, Reinforcement
from bloomery.types.resources import Resource


class Plain(Resource):
    """A class of a test."""

    said: int
    """In one line,
    and another."""
    silent: int


class Heir(Plain):
    more: int = 1
    """Of its own."""


def described(model: type[Resource]) -> dict[str, str | None]:
    return {name: field.get("description") for name, field in model.model_json_schema()["properties"].items()}


def test_a_field_is_described_by_the_text_behind_it() -> None:
    assert described(Plain) == {"said": "In one line,\nand another.", "silent": None}


def test_fields_of_the_class_that_it_comes_of_are_described_too() -> None:
    assert described(Heir) == {"said": "In one line,\nand another.", "silent": None, "more": "Of its own."}


def test_what_somebody_chooses_of_a_job_is_explained() -> None:
    explained_by_themselves = {
        "kind",
        "optimizer",
        "batches",
        "early_stopping",
        "clip",
        "schedule",
        "metadata",
        "data",
        "method",
        "begin",
        "evaluation",
        "watch",
    }
    for model in (JobSpec, Reinforcement, Optimizer):
        assert {name for name, words in described(model).items() if not words} <= explained_by_themselves, model
