"""Observation: logs, failpoints, tasks in the background, and what a machine has; standard library only."""
