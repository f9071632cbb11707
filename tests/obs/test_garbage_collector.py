import gc

from bloomery.obs.garbage_collector import spare_what_stays


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
        gc.unfreeze()
