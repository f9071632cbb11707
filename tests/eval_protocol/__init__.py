"""Eval Protocol's remote rollouts and evaluations, with the package unmodified, against our loops."""
