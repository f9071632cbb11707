"""Weights that leave their runs: `publishing` shares them, `exports` and `external` hand them to other programs.

`versions` and `deployments` are what is served; `staging` sees to it that it can be before a name is moved to it, and a `target` is what a name means
at the moment it is asked for. `fidelity` measures what is published against its trainer.
"""
