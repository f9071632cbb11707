"""Observation: logs, failpoints, tasks in the background, what the machine has, and what is durable on its disk; standard library only."""
