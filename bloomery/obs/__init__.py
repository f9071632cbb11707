"""Observation: logs, failpoints, tasks in the background, and what the machine has; standard library only."""
