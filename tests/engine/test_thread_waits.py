"""How long threads look for work before they sleep, by what a process is for."""

from bloomery.engine.thread_waits import prepare_threads


def test_threads_of_an_engine_that_trains_look_longer_than_those_of_a_replica_and_neither_without_end():
    found = {}
    for role in ("engine", "replica"):
        found[role] = {}
        prepare_threads(found[role], role, 3)
        assert found[role]["OMP_NUM_THREADS"] == "3"
        assert found[role]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(found["replica"]["GOMP_SPINCOUNT"]) < int(found["engine"]["GOMP_SPINCOUNT"]) < 10_000


def test_what_the_user_set_stays():
    environment = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "1"}
    prepare_threads(environment, "engine", 2)
    assert environment == {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
