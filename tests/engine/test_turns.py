"""Turns are shared by projects, not by runs: what a tenant waits for does not grow with the runs of another."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.engine.ledger import Ledger
from bloomery.engine.training import Training
from bloomery.engine.turns import Turns
from bloomery.types.operations import Operation
from bloomery.types.protocol import Execute, FromEngine, OperationDone
from tests.train import builders
from tests.train.builders import learn, step, supervised

MODEL = builders.decoder()
ROWS = 64
"""Of a pass, and of a micro-batch."""
HUGE = learn(supervised([ROWS] * 12))


class Stage:
    """Training of many runs on one small model, a turn at a time; `sent` is what it told."""

    def __init__(self, directory: Path, projects: Mapping[str, str]) -> None:
        self.sent: list[FromEngine] = []
        self.training = Training(Ledger(directory / "a.in-hand"), self.sent.append, pass_rows=ROWS)
        for run_id, project in projects.items():
            run = builders.run(MODEL, run_id=run_id, budget=ROWS, rank=1)
            hosted = HostedRun(run, lambda key, data: None, last_seq=-1, checkpoint_after=CheckpointAfter())
            self.training.hold(hosted, project)

    def execute(self, run_id: str, *operations: Operation) -> None:
        for seq, operation in enumerate(operations):
            self.training.runs[run_id].receive(Execute(run_id=run_id, seq=seq, operation=operation))

    def turns(self) -> Iterator[list[str]]:
        """Of each turn, whose operations ended in it."""
        seen = 0
        while self.training.take_turn(begin=True):
            done = [message.run_id for message in self.sent[seen:] if isinstance(message, OperationDone)]
            seen = len(self.sent)
            yield done


def turns_between(stage: Stage, run_id: str) -> list[int]:
    """How many turns others had before each of a run's operations ended; it ends with the last of them."""
    waits, others = [], 0
    for done in stage.turns():
        if run_id in done:
            waits.append(others)
            others = 0
            if not stage.training.runs[run_id].waiting:
                return waits
        else:
            others += 1
    raise AssertionError(f"{run_id} has work that nobody does")


def test_a_small_run_waits_for_one_pass_of_a_project_however_many_runs_that_has(tmp_path):
    many = {f"run-{number}": "huge" for number in range(32)}
    stage = Stage(tmp_path, {**many, "run-small": "small"})
    for run_id in many:
        stage.execute(run_id, HUGE, HUGE)
    stage.execute("run-small", *[learn(supervised([9])), step()] * 5)
    assert max(turns_between(stage, "run-small")) == 1
    # Nobody else was done with a batch: else the small run would not have been held up by these.
    assert not any(isinstance(message, OperationDone) and message.run_id != "run-small" for message in stage.sent)


def test_every_further_project_costs_one_pass_more(tmp_path):
    projects = {f"run-{number}": f"project-{number % 3}" for number in range(12)}
    stage = Stage(tmp_path, {**projects, "run-small": "small"})
    for run_id in projects:
        stage.execute(run_id, HUGE)
    stage.execute("run-small", *[learn(supervised([9])), step()] * 3)
    assert max(turns_between(stage, "run-small")) == 3


def test_runs_of_one_project_take_turns_as_projects_do(tmp_path):
    stage = Stage(tmp_path, {"run-a": "one", "run-b": "one", "run-small": "one"})
    for run_id in ("run-a", "run-b"):
        stage.execute(run_id, HUGE)
    stage.execute("run-small", *[learn(supervised([9])), step()] * 2)
    assert max(turns_between(stage, "run-small")) == 2


def test_a_pass_with_room_takes_a_run_of_every_project_before_a_second_of_any(tmp_path):
    projects = {"run-a1": "a", "run-a2": "a", "run-a3": "a", "run-b": "b", "run-c": "c"}
    stage = Stage(tmp_path, projects)
    for run_id in projects:
        stage.execute(run_id, learn(supervised([16])))
    assert [sorted(done) for done in stage.turns()] == [["run-a1", "run-a2", "run-b", "run-c"], ["run-a3"]]


RUNS = st.dictionaries(st.integers(0, 30), st.integers(0, 4), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(runs=RUNS, idle=st.lists(st.booleans(), min_size=31, max_size=31))
def test_between_two_turns_of_a_run_every_other_project_has_at_most_one(runs, idle):
    turns = Turns()
    for run, project in runs.items():
        turns.join(str(run), str(project))
    working = {run for run in runs if not idle[run]}
    heads = []
    for _ in range(60 if working else 0):
        head = next(turns.among(lambda run_id: int(run_id) in working))
        turns.had(head)
        heads.append(int(head))
    for run in working:
        mine = [place for place, head in enumerate(heads) if head == run]
        siblings = {other for other in working if runs[other] == runs[run]}
        projects = {runs[other] for other in working}
        gaps = [later - earlier for earlier, later in pairwise(mine)]
        # Exactly: nobody is passed over, and nobody comes twice.
        assert set(gaps) <= {len(siblings) * len(projects)}
        assert mine[0] < len(siblings) * len(projects)


@settings(max_examples=200, deadline=None)
@given(runs=RUNS, gone=st.sets(st.integers(0, 30)))
def test_whoever_left_has_no_turn_and_everybody_else_has_one(runs, gone):
    turns = Turns()
    for run, project in runs.items():
        turns.join(str(run), str(project))
    for run in gone & runs.keys():
        turns.leave(str(run))
    assert sorted(turns.among(lambda run_id: True)) == sorted(str(run) for run in runs.keys() - gone)
