"""Observation: logs, metrics and failpoints; standard library only."""
