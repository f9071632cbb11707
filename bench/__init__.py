"""Benchmarks: one file each, one command each, one JSON line each."""
