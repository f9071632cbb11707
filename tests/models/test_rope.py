"""Rotations that are looked up have the bits of those that are computed alone, however far the table has grown and whoever grows it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from bloomery.models.config import RopeConfig
from bloomery.models.packed import pack
from bloomery.models.rope import Rope
from tests.train.builders import decoder


def rope() -> Rope:
    return Rope(RopeConfig(kind="default", theta=10_000.0, scaling={"original_max_position_embeddings": 1024}), 64)


def turned(of: Rope, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rotation = of(torch.tensor(positions, dtype=torch.long), torch.float32)
    return rotation.cos_R1H, rotation.sin_R1H


def test_a_position_has_the_same_bits_in_every_table():
    grown, far = rope(), rope()
    for positions in ([3], [1023, 1024], [5000, 7, 1024], [40_000]):
        for mine, theirs in zip(turned(grown, positions), turned(far, [50_000, *positions]), strict=True):
            assert torch.equal(mine, theirs[1:])


def test_cosines_and_sines_are_those_of_the_angles():
    positions = [0, 1, 999, 1024, 3071]
    angles = torch.tensor(positions).double()[:, None] / 10_000 ** (torch.arange(0, 64, 2).double() / 64)
    for found, exact in zip(turned(rope(), positions), (angles.cos(), angles.sin()), strict=True):
        # An angle of some thousands is known to its own last place in float32.
        torch.testing.assert_close(found[:, 0].double(), exact, rtol=0, atol=2e-4)


def test_threads_that_grow_it_at_once_find_what_they_asked_for():
    shared, alone = rope(), rope()
    asked = [[1000 * place + 5] for place in range(12)]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda positions: turned(shared, positions), asked))
    assert all(torch.equal(cos, turned(alone, positions)[0]) for (cos, _), positions in zip(found, asked, strict=True))


def test_no_positions_turn_nothing():
    assert [len(each) for each in turned(rope(), [])] == [0, 0]


def test_a_packed_twin_turns_by_the_table_of_its_decoder():
    plain = decoder()
    twin = pack(plain)
    assert (twin.rope, twin.full_rope) == (plain.rope, plain.full_rope)
