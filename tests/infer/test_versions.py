"""Many versions at once: whole models beside adapters, and what stays in memory."""

from threading import Event, Thread

import pytest
import torch

from bloomery.infer.plan import Limits
from bloomery.infer.versions import UPDATES_IN_MEMORY, VERSIONS_IN_MEMORY, Model, Versions
from bloomery.models.decoder import Decoder
from bloomery.types.errors import Conflict, Unavailable
from bloomery.types.generation import Weights
from tests.infer.builders import adapter, generate, naive, prompt, request, sampler
from tests.train.builders import decoder

LENGTHS = (1, 3, 77, 200, 333, 513)
SCORE = {"prompt_logprobs": True}


def other_model(base: Decoder, seed: int) -> Decoder:
    """A model of the same form with other weights."""
    model = decoder(dtype=base.dtype, experts=base.config.experts is not None)
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.05)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "experts"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_whole_models_and_adapters_are_sampled_together_and_each_has_its_own_bits(dtype, experts):
    base = decoder(dtype=dtype, experts=experts)
    versions = {"full-1": other_model(base, 1), "v1": adapter(base, 1), "full-2": other_model(base, 2)}
    names = ("base", "full-1", "v1", "full-2")
    requests = [
        request(f"r{length}-{version}", prompt(length), version=version, seed=length, max_tokens=5, asked=SCORE)
        for length in LENGTHS
        for version in names
    ]
    together = generate(sampler(base, versions, Limits(slots=16, token_budget=300)), *requests)
    for each in requests:
        weights = versions.get(each.weights.version)
        model, fused = (weights, None) if isinstance(weights, Decoder) else (base, weights)
        tokens, logprobs = naive(model, each.prompt.numpy().tolist(), each.params, fused)
        answer = together[each.request_id]
        assert (answer.tokens, answer.logprobs) == ({0: tokens}, {0: logprobs}), each.request_id


class Sized:
    """Versions named by their size in bytes; knows what was loaded and what is still held."""

    def __init__(self) -> None:
        self.loads: list[str] = []

    def weigh(self, weights: Weights) -> int:
        return int(weights.version.partition("-")[0])

    def load(self, weights: Weights) -> Model:
        self.loads.append(weights.version)
        return Model(weights.version, None, None)


def used(versions: Versions, *names: str, in_use: tuple[str, ...] = ()) -> None:
    for name in names:
        assert found(versions, name, in_use=in_use).version == name


def found(versions: Versions, name: str, in_use: tuple[str, ...] = ()) -> Model:
    assert versions.ask(Weights(version=name, key="k"), in_use=in_use)
    versions.wait(60)
    model = versions.take(name)
    assert model is not None
    return model


def test_a_step_waits_a_moment_for_light_weights_that_it_begins_to_load_and_not_twice():
    may_load, began = Event(), Event()

    class Held(Sized):
        def load(self, weights: Weights) -> Model:
            if weights.version.endswith("held"):
                began.set()
                assert may_load.wait(60)
            return super().load(weights)

    light = Versions(Held(), lambda: 1000, at_once_s=60)
    assert light.ask(Weights(version="1-light", key="k"), in_use=())
    assert light.take("1-light") is not None
    heavy = Versions(Held(), lambda: 1000, at_once_s=0.05)
    assert heavy.ask(Weights(version="1-held", key="k"), in_use=())
    assert began.wait(60)
    assert heavy.take("1-held") is None
    patient = Versions(Held(), lambda: 1000, at_once_s=60)
    patient.settle(())
    began.clear()
    asking = Thread(target=patient.ask, args=(Weights(version="1-held", key="k"),), kwargs={"in_use": ()})
    asking.start()
    assert began.wait(60)
    assert asking.is_alive()
    may_load.set()
    asking.join(60)
    assert patient.take("1-held") is not None


def test_a_step_waits_no_longer_for_a_load_than_it_takes_itself_and_all_together_no_longer_than_a_light_one_takes():
    may_load = Event()

    class Held(Sized):
        def load(self, weights: Weights) -> Model:
            assert may_load.wait(60)
            return super().load(weights)

    versions = Versions(Held(), lambda: 1000, at_once_s=120)
    versions.settle((), step_s=0)
    assert versions.ask(Weights(version="1-a", key="k"), in_use=())
    versions.settle({"1-a"}, step_s=0)
    assert versions.take("1-a") is None
    later = Thread(target=versions.settle, args=({"1-a"},), kwargs={"step_s": 60})
    later.start()
    later.join(0.1)
    assert later.is_alive()
    may_load.set()
    later.join(60)
    assert versions.take("1-a") is not None
    may_load.clear()
    spent = Versions(Held(), lambda: 1000, at_once_s=0.05)
    assert spent.ask(Weights(version="1-a", key="k"), in_use=())
    # Had it waited as long as the step takes, the load would have given up, which `take` says.
    spent.settle({"1-a"}, step_s=120)
    assert spent.take("1-a") is None
    may_load.set()


def test_what_was_used_least_recently_makes_room():
    source = Sized()
    versions = Versions(source, lambda: 10_000, limit_bytes=100)
    used(versions, "40-a", "40-b", "40-a", "40-c")
    assert versions.held_bytes == 80
    used(versions, "40-a", "40-c")
    assert source.loads == ["40-a", "40-b", "40-c"]
    used(versions, "40-b")
    assert source.loads[3:] == ["40-b"]
    used(versions, "40-c", "40-a")
    assert source.loads[4:] == ["40-a"]


def test_while_everything_is_in_use_whoever_names_something_else_waits():
    source = Sized()
    versions = Versions(source, lambda: 10_000, limit_bytes=100)
    used(versions, "60-a")
    assert not versions.ask(Weights(version="60-b", key="k"), in_use=("60-a",))
    assert source.loads == ["60-a"]
    used(versions, "60-b")
    assert source.loads == ["60-a", "60-b"]
    assert versions.held_bytes == 60


def test_one_that_is_over_the_limit_by_itself_is_served_alone():
    versions = Versions(Sized(), lambda: 10_000, limit_bytes=100)
    used(versions, "40-a", "300-b")
    assert versions.held_bytes == 300
    assert not versions.ask(Weights(version="1-c", key="k"), in_use=("300-b",))


def test_what_was_given_as_tensors_stays_until_it_is_let_go_and_there_are_so_many():
    versions = Versions(Sized(), lambda: 10_000, limit_bytes=100)
    for index in range(UPDATES_IN_MEMORY):
        versions.hold(Model(f"given-{index}", None, None), 1, pinned=True)
    with pytest.raises(Conflict, match="16 versions that were given as tensors are in memory"):
        versions.hold(Model("given-too", None, None), 1, pinned=True)
    used(versions, "60-a", "60-b")
    assert versions.held_bytes == 60 + UPDATES_IN_MEMORY
    versions.let_go("given-0")
    versions.let_go("60-b")
    assert versions.held_bytes == 60 + UPDATES_IN_MEMORY - 1
    versions.forget_idle(())
    assert versions.held_bytes == UPDATES_IN_MEMORY - 1


def test_what_was_loaded_for_who_is_gone_is_there_for_the_next():
    source = Sized()
    versions = Versions(source, lambda: 10_000, limit_bytes=100)
    assert versions.ask(Weights(version="40-a", key="k"), in_use=())
    versions.wait(60)
    versions.settle({"40-a"})
    assert versions.held_bytes == 0
    versions.settle(())
    assert versions.held_bytes == 40


def test_small_versions_are_bounded_by_their_number():
    versions = Versions(Sized(), lambda: 10_000, limit_bytes=10**9)
    used(versions, *(f"1-{index}" for index in range(VERSIONS_IN_MEMORY + 5)))
    assert versions.held_bytes == VERSIONS_IN_MEMORY


def test_what_does_not_fit_is_refused_with_the_numbers_and_harms_nobody():
    source = Sized()
    versions = Versions(source, lambda: 500 - versions.held_bytes, limit_bytes=10**9)
    used(versions, "100-a", "0-base")
    with pytest.raises(Unavailable, match=r"version 300-b takes 600 bytes of memory to load, 400 are free"):
        versions.ask(Weights(version="300-b", key="k"), in_use=())
    used(versions, "0-base", "100-a")
    assert source.loads == ["100-a", "0-base"]


def test_before_one_is_refused_whoever_holds_memory_that_stands_empty_gives_it_back():
    there = [500]
    versions = Versions(Sized(), lambda: there[0] - versions.held_bytes, lambda: there.append(there.pop() + 200), limit_bytes=10**9)
    used(versions, "100-a", "200-b")
    assert there == [500], "nobody lacked any"
    used(versions, "200-c")
    assert (there, versions.held_bytes) == ([700], 500), "nothing that is held goes for it"
    with pytest.raises(Unavailable, match=r"takes 1400 bytes of memory to load, 400 are free"):
        versions.ask(Weights(version="700-d", key="k"), in_use=())


def test_idle_versions_go_when_memory_is_short():
    source = Sized()
    versions = Versions(source, lambda: 500 - versions.held_bytes, limit_bytes=10**9)
    used(versions, "100-a", "100-b", "200-c")
    assert versions.held_bytes == 300
    assert not versions.ask(Weights(version="200-d", key="k"), in_use=("200-c", "100-b"))
    assert versions.held_bytes == 300
    used(versions, "200-d")
    with pytest.raises(Unavailable, match="300 are free"):
        versions.ask(Weights(version="300-e", key="k"), in_use=())


@pytest.mark.parametrize("size_bytes", [0, 1])
def test_a_version_that_cannot_be_loaded_is_asked_for_again(size_bytes):
    class Damaged(Sized):
        def weigh(self, weights: Weights) -> int:
            return size_bytes

        def load(self, weights: Weights) -> Model:
            super().load(weights)
            raise KeyError(weights.version)

    shelf = Damaged()
    versions = Versions(shelf, lambda: 10**9)
    for _ in range(2):
        with pytest.raises(KeyError):
            found(versions, "v1")
    assert shelf.loads == ["v1", "v1"]
