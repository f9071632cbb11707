import gc

from bloomery.obs.garbage_collector import importing, spare_what_stays


class Knot:
    """A cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_not_looked_at_again_and_what_comes_later_is_still_collected() -> None:
    try:
        spare_what_stays()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1_000
        later: list[object] = []
        later.append(later)
        del later
        assert gc.collect() >= 1
    finally:
        # As `tests/conftest.py` left it.
        gc.freeze()


def test_the_cycles_of_an_import_are_passed_over_until_what_stays_is_spared() -> None:
    def knots() -> int:
        return sum(type(each) is Knot for each in gc.get_objects())

    try:
        with importing():
            assert not gc.isenabled()
            Knot()
        assert gc.isenabled()
        gc.collect()
        gc.unfreeze()
        assert knots() == 1
        gc.freeze()
        spare_what_stays()
        gc.unfreeze()
        assert knots() == 0
    finally:
        # As `tests/conftest.py` left it.
        gc.freeze()
