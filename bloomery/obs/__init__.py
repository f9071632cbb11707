"""Observation: logs, failpoints, and what the machine has; standard library only."""
