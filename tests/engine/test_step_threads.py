"""Which number of threads steps are given."""

from collections import Counter

from bloomery.engine.step_threads import StepThreads


def steps(chooser: StepThreads, samples: int, seconds: dict[int, float], count: int) -> Counter[int]:
    taken: Counter[int] = Counter()
    for _ in range(count):
        threads = chooser.choose(samples)
        chooser.took(samples, threads, seconds[threads])
        taken[threads] += 1
    return taken


def test_steps_go_to_the_faster_number_and_seldom_to_the_other() -> None:
    for seconds in ({4: 0.02, 1: 0.01}, {4: 0.01, 1: 0.02}):
        taken = steps(StepThreads(4, one_thread=True), 16, seconds, 1000)
        slower = max(seconds, key=lambda threads: seconds[threads])
        assert 10 <= taken[slower] <= 30


def test_the_choice_follows_the_company_and_the_size_of_a_step() -> None:
    chooser = StepThreads(2, one_thread=True)
    steps(chooser, 16, {2: 0.02, 1: 0.01}, 200)
    steps(chooser, 1, {2: 0.001, 1: 0.003}, 200)
    assert (chooser.choose(16), chooser.choose(1)) == (1, 2)
    steps(chooser, 16, {2: 0.005, 1: 0.01}, 1000)
    assert chooser.choose(16) == 2


def test_one_long_step_changes_the_choice_for_a_moment_only() -> None:
    chooser = StepThreads(2, one_thread=True)
    steps(chooser, 4, {2: 0.02, 1: 0.01}, 100)
    chooser.took(4, 1, 1.0)
    assert steps(chooser, 4, {2: 0.02, 1: 0.01}, 400)[1] > 200


def test_all_threads_compute_where_one_alone_has_other_bits() -> None:
    assert steps(StepThreads(2, one_thread=False), 8, {2: 1.0}, 100) == {2: 100}
    assert steps(StepThreads(1, one_thread=True), 8, {1: 1.0}, 100) == {1: 100}
