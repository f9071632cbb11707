"""What a job is asked for."""

import json
from typing import Any

from bloomery.types.jobs import JobSpec
from bloomery.types.methods import Optimizer, Reinforcement, Schedule


def test_a_job_of_before_there_was_an_optimizer_says_the_same() -> None:
    kept = '{"name": "a", "base_model": "b", "data": {"dataset": "c"}, "method": {"kind": "rft", "grader": "d", "learning_rate": 0.01, "steps": 3}}'
    method = JobSpec.model_validate_json(kept).method
    assert isinstance(method, Reinforcement)
    usual = Reinforcement(grader="d", steps=3)
    assert method == usual.model_copy(update={"optimizer": usual.optimizer.model_copy(update={"learning_rate": 0.01})})
    assert JobSpec.model_validate_json(JobSpec.model_validate_json(kept).model_dump_json()).method == method


def test_what_is_not_said_of_a_part_is_as_the_method_has_it_by_itself() -> None:
    spec = {"name": "a", "base_model": "b", "data": {"dataset": "c"}}

    def read(**method: Any) -> Any:
        given = spec | {"method": method}
        read = JobSpec.model_validate_json(json.dumps(given)).method
        assert JobSpec.model_validate(given).method == read
        return read

    usual = read(kind="rft", grader="d").optimizer
    said = read(kind="rft", grader="d", optimizer={"learning_rate": 0.01, "schedule": {"kind": "cosine"}}).optimizer
    changed = {"learning_rate": 0.01, "schedule": usual.schedule.model_copy(update={"kind": "cosine"})}
    assert (usual.schedule.warmup_share, usual.grad_clip_norm) == (0.0, 1.0)
    assert said == usual.model_copy(update=changed)
    assert Reinforcement(grader="d", optimizer=Optimizer(learning_rate=0.01, schedule=Schedule(kind="cosine"))).optimizer == said
    assert read(kind="sft", optimizer={"weight_decay": 0.1}).optimizer.learning_rate == 1e-3
    dealt = read(kind="dpo", batches={"rows": 8}).batches
    assert (dealt.epochs, dealt.rows) == (1.0, 8)


def test_what_is_of_something_else_has_its_default_only_where_that_is() -> None:
    alone = Reinforcement(grader="g").resolved()
    assert (alone.max_staleness, alone.held_out_share) == (None, None)
    both = Reinforcement(grader="g", asynchronous=True, held_out_grader="h")
    assert (both.resolved().max_staleness, both.resolved().held_out_share) == (1, 0.25)
    given = both.model_copy(update={"max_staleness": 0, "held_out_share": 1.0})
    assert given.resolved() == given
