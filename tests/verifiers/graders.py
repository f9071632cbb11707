"""Reward functions of rubrics as graders: this file is the source that is graded with."""

import verifiers


def with_state(completion, answer, state, **kwargs):  # type: ignore[no-untyped-def]
    assert verifiers.__version__
    return float(completion[-1]["content"] == answer) if state["completion"] == completion else None


async def asynchronous(prompt, info):  # type: ignore[no-untyped-def]
    return len(prompt) + info["level"]
