"""What the comparison of both loops tells of a loop that is slow to do its first step."""

from bench.async_rl import Note, newest_after_quarters
from bloomery.recipes.grpo import StepReport


def test_until_a_step_is_done_the_newest_weights_are_those_of_the_model() -> None:
    notes = [Note(seconds, StepReport(step, f"version-{step}", {}, ())) for step, seconds in ((1, 3.0), (2, 3.5), (3, 7.0))]
    assert newest_after_quarters(notes, 8.0) == ["bloomery-tiny", "version-2", "version-2", "version-3"]
