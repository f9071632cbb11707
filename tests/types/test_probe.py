"""What is refused of two sides of a probe, and what is not."""

import numpy as np
import pytest

from bloomery.types.errors import Corrupt
from bloomery.types.probe import (
    LARGEST_RMS,
    MARGIN,
    ROUNDING,
    ProbeAnswer,
    Probed,
    Sides,
    base_name,
    judge,
    logprob_bytes,
    logprobs_of,
    probe_key,
    probe_tokens,
    read_answer,
    rounding,
)

BEFORE = np.linspace(-9.0, -0.5, 17).astype(np.float32)
NOISE = np.random.default_rng(0)


def moved(size: float) -> np.ndarray:
    """The log-probabilities of a version that was trained on, by so much."""
    return (BEFORE + NOISE.normal(0, size, 17)).astype(np.float32)


def rounded(values: np.ndarray, size: float) -> np.ndarray:
    return (values + NOISE.normal(0, size, 17)).astype(np.float32)


BASE = Sides("old", BEFORE, BEFORE)


def verdict(
    sampler: np.ndarray, trainer: np.ndarray, before: Sides = BASE, *, exact: bool = True, dtype: str = "float32", base: Sides | None = None
) -> Probed:
    noise = rounding(before if base is None else base, dtype)
    return judge(Sides("new", sampler, trainer), before, exact=exact, noise=noise, expected="published")


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-5, 0.0])
def test_who_moves_as_predicted_is_served(size: float) -> None:
    new = moved(size)
    found = verdict(new, new)
    assert (found.bit_equal, found.max_abs, found.against) == (True, 0.0, "old")
    assert found.predicted == found.moved
    assert found.tells == bool((new != BEFORE).any())


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_who_stands_still_is_refused_however_small_the_step(size: float) -> None:
    with pytest.raises(Corrupt, match="the sampler does not compute with what was trained"):
        verdict(BEFORE, moved(size))


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-4])
def test_so_is_who_moves_elsewhere_or_by_half_or_twice_as_far(size: float) -> None:
    new = moved(size)
    for share in (0.3, 2.0, -1.0):
        with pytest.raises(Corrupt, match="is not served"):
            verdict((BEFORE + share * (new - BEFORE)).astype(np.float32), new, exact=False)
    with pytest.raises(Corrupt, match="is not served"):
        verdict(moved(size), new, exact=False)


def test_who_moves_where_the_trainer_does_not_is_refused() -> None:
    with pytest.raises(Corrupt, match="does not compute with what was trained"):
        verdict(moved(1e-3), BEFORE)


def test_who_is_far_from_its_trainer_is_refused_whatever_moved() -> None:
    new = moved(3.0)
    with pytest.raises(Corrupt, match="does not answer its probe as its trainer does"):
        verdict(rounded(new, 0.5), new)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-5])
def test_where_bits_are_promised_one_that_differs_is_refused(size: float) -> None:
    new = moved(size)
    near = new.copy()
    near[5] = np.nextafter(near[5], np.float32(0))
    with pytest.raises(Corrupt, match="version new is not served: equal bits are promised") as refused:
        verdict(near, new)
    for advice in ("bloomery fidelity", "--plain", f"{abs(near[5] - new[5]):.3g} nats"):
        assert advice in refused.value.message
    assert not verdict(near, new, exact=False).bit_equal


@pytest.mark.parametrize("share", [0.7, 0.9, 1.2, 1.4])
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_where_bits_are_promised_so_is_who_moves_a_little_less_or_more_than_predicted(share: float, size: float) -> None:
    new = moved(size)
    with pytest.raises(Corrupt, match="version new is not served: equal bits are promised"):
        verdict((BEFORE + share * (new - BEFORE)).astype(np.float32), new)


def test_what_a_version_that_was_served_was_off_by_excuses_nobody() -> None:
    first, new = moved(0.5), moved(0.5)
    # Just below the bar, as a sampler with a part of the adapter may be.
    served = Sides("old", first + np.float32(0.9 * LARGEST_RMS), first)
    assert verdict(served.sampler, first, exact=False).max_abs > 0.1
    frozen = (new + 2 * np.float32(LARGEST_RMS)).astype(np.float32)
    with pytest.raises(Corrupt, match="does not answer its probe as its trainer does"):
        verdict(frozen, new, served, exact=False, base=BASE)
    with pytest.raises(Corrupt, match="does not compute with what was trained"):
        verdict(served.sampler, first + np.float32(0.1), served, exact=False, base=BASE)


def test_rounding_is_measured_under_the_base_and_is_never_less_than_that_of_its_dtype() -> None:
    assert rounding(BASE, "bfloat16") == ROUNDING["bfloat16"]
    assert rounding(Sides("b", BEFORE + np.float32(0.0625), BEFORE), "bfloat16") == pytest.approx(0.0625, rel=1e-4)
    assert MARGIN * ROUNDING["bfloat16"] < LARGEST_RMS


@pytest.mark.parametrize(("dtype", "size_of_rounding"), [("float32", 4e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
def test_rounding_alone_is_no_reason(dtype: str, size_of_rounding: float, size: float) -> None:
    before = Sides("old", rounded(BEFORE, size_of_rounding), BEFORE)
    for _ in range(100):
        new = moved(size)
        assert not verdict(rounded(new, size_of_rounding), new, before, exact=False, dtype=dtype).bit_equal


def test_what_could_not_have_been_told_from_rounding_says_so() -> None:
    before, new = Sides("old", rounded(BEFORE, 2e-2), BEFORE), moved(1e-3)
    assert not verdict(before.sampler, new, before, exact=False, dtype="bfloat16").tells
    assert verdict(moved(0.0) + np.float32(1.0), BEFORE + np.float32(1.0), before, exact=False, dtype="bfloat16").tells


@pytest.mark.parametrize("side", [0, 1])
def test_weights_that_give_no_numbers_are_refused(side: int) -> None:
    sides = [BEFORE.copy(), BEFORE.copy()]
    sides[side][3] = np.nan
    with pytest.raises(Corrupt, match="no finite log-probabilities"):
        verdict(*sides)


def test_the_trainers_side_is_stored_and_read_back() -> None:
    answer = ProbeAnswer(version="v", parent="u", numerics="n", tokens=probe_tokens(300, 1024), logprobs=logprob_bytes(BEFORE))
    assert read_answer(answer.to_json(), "v") == answer
    assert np.array_equal(logprobs_of(answer), BEFORE)
    assert probe_key(base_name("b", "float32")) == "probes/b-float32.json"
    for damaged, version in ((b"", "v"), (answer.to_json()[:-9], "v"), (answer.to_json().replace(b"[3,", b"["), "v"), (answer.to_json(), "w")):
        with pytest.raises(Corrupt, match="delete it"):
            read_answer(damaged, version)


@pytest.mark.parametrize(("vocab_size", "context"), [(300, 1024), (5, 7)])
def test_a_probe_fits_into_small_models(vocab_size: int, context: int) -> None:
    tokens = probe_tokens(vocab_size, context)
    assert len(tokens) == min(18, context)
    assert set(tokens) <= set(range(vocab_size))
