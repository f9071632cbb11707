"""Names that the shell completes: of what the running server has. Where nobody answers at once there are none, and nothing is said."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import typer

from bloomery.cli.options import DATA_DIR
from bloomery.cli.running import client_of
from bloomery.client import Client
from bloomery.types.evaluations import EvaluationState
from bloomery.types.jobs import JobState

AT_ONCE_S: Final = 1.0
"""Whoever has pressed a key waits no longer."""
Completion = Callable[[typer.Context, str], list[str]]


def _completion(names: Callable[[Client], Iterable[str]]) -> Completion:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        # A line that is half typed, a server that is away or an old one: none of it is worth a word in the middle of the line.
        try:
            with _client(ctx) as client:
                return sorted({name for name in names(client) if name.startswith(incomplete)})
        except Exception:
            return []

    return complete


def _client(ctx: typer.Context) -> Client:
    """Of the server that the line says, as far as it is typed."""
    return client_of(Path(ctx.params.get("data_dir") or DATA_DIR), ctx.params.get("url"), timeout_s=AT_ONCE_S, patience_s=0)


jobs: Final = _completion(lambda client: (job.spec.name for job in client.jobs.list()))
datasets: Final = _completion(lambda client: (dataset.name for dataset in client.datasets.list()))
graders: Final = _completion(lambda client: (grader.name for grader in client.graders.list()))
deployments: Final = _completion(lambda client: (deployment.name for deployment in client.deployments.list()))
models: Final = _completion(lambda client: (model.alias for model in client.models()))
sources: Final = _completion(
    lambda client: [*(job.spec.name for job in client.jobs.list(state=JobState.SUCCEEDED)), *(m.alias for m in client.models())]
)
evaluations: Final = _completion(lambda client: (evaluation.spec.name for evaluation in client.evaluations.list()))
evidence: Final = _completion(
    lambda client: [
        *(evaluation.spec.name for evaluation in client.evaluations.list(state=EvaluationState.SUCCEEDED)),
        *(job.spec.name for job in client.jobs.list(state=JobState.SUCCEEDED)),
    ]
)
asked: Final = _completion(lambda client: [*(model.alias for model in client.models()), *(each.name for each in client.deployments.list())])
keys: Final = _completion(lambda client: (key.name for key in client.keys.list()))
