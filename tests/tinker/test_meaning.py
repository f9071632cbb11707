"""What of a request counts when it comes again: also in a release that knows more fields."""

from typing import Any

from bloomery.api.routes.tinker.bodies import Adam, CreateModel, Lora, Numbered, OptimStep, SaveForSampler, SaveWeights
from bloomery.api.routes.tinker.meaning import hash_of, hash_of_operation

STEP: dict[str, Any] = {"model_id": "s:train:0", "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}


class LaterAdam(Adam):
    amsgrad: bool = False


class LaterStep(OptimStep):
    adam_params: LaterAdam | None = None
    note: str | None = None


class LaterLora(Lora):
    alpha: float = 32.0


class LaterModel(CreateModel):
    lora_config: LaterLora | None = None
    note: str | None = None


def of(body: dict[str, Any], kind: Any, route: str = "route") -> bytes:
    return hash_of_operation(route, Numbered(**body), kind)


def test_fields_that_a_later_release_adds_change_no_hash_of_what_does_not_say_them() -> None:
    assert of(STEP, OptimStep) == of(STEP, LaterStep)
    assert of(STEP, LaterStep) != of(STEP | {"note": "x"}, LaterStep)
    assert of(STEP, LaterStep) != of(STEP | {"adam_params": {"learning_rate": 1e-3, "amsgrad": True}}, LaterStep)
    made = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert hash_of("create_model", CreateModel(**made)) == hash_of("create_model", LaterModel(**made))


def test_defaults_may_be_said_or_left_out() -> None:
    assert of(STEP, OptimStep) == of(STEP | {"optimizer_params": None, "adam_params": {"beta1": 0.9, "learning_rate": 0.001}}, OptimStep)
    assert of(STEP, OptimStep) != of(STEP | {"adam_params": {"beta1": 0.8, "learning_rate": 0.001}}, OptimStep)
    assert of(STEP, OptimStep) != of(STEP | {"adam_params": {}}, OptimStep)
    assert of(STEP | {"adam_params": {}}, OptimStep) != of({"model_id": "s:train:0", "seq_id": 1}, OptimStep)


def test_one_that_makes_no_sense_is_what_it_says() -> None:
    bad = STEP | {"unheard_of": 1}
    assert of(bad, OptimStep) == of(dict(reversed(bad.items())), OptimStep)
    assert len({of(bad, OptimStep), of(STEP, OptimStep), of(bad | {"unheard_of": 2}, OptimStep)}) == 3


def test_of_the_sampler_that_weights_are_for_only_its_being_there_counts() -> None:
    saved = {"model_id": "s:train:0", "seq_id": 1}
    numbered = [of(saved | {"sampling_session_seq_id": number}, SaveForSampler) for number in (0, 7)]
    assert numbered[0] == numbered[1] != of(saved, SaveForSampler)
    assert of(saved | {"sampling_session_seq_id": None}, SaveForSampler) == of(saved, SaveForSampler)


def test_routes_are_told_apart() -> None:
    saved = {"model_id": "s:train:0", "seq_id": 1, "path": "one"}
    assert of(saved, SaveWeights, "save_weights") != of(saved, SaveForSampler, "save_weights_for_sampler")
