"""Observation: logs, failpoints, tasks in the background, what hangs, what a machine has and what its disk keeps; standard library only."""
