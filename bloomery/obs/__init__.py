"""Observation: logs and failpoints; standard library only."""
