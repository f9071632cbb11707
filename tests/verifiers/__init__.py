"""Environments of the package `verifiers`, unmodified, against our loops."""
