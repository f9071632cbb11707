"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from bloomery.config import GraderLevel
from bloomery.config.data_dir import DEFAULT_DATA_DIR

DataDirOption = Annotated[Path, typer.Option("--data-dir", help="Where everything that survives lies.")]
DATA_DIR = DEFAULT_DATA_DIR
UrlOption = Annotated[str | None, typer.Option("--url", help="Another server than the running one here; its key in BLOOMERY_API_KEY.")]

_SHIPPED = "Without any: bloomery-tiny, which others replace unless it is named beside them."
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="NAME_OR_DIR", help=f"A known name, a directory that save_pretrained wrote, or alias=DIR. Repeatable. {_SHIPPED}"
    ),
]
EndpointsOption = Annotated[
    Path | None,
    typer.Option("--endpoints", dir_okay=False, help="YAML with models elsewhere that graders and evaluations may ask (docs/operate.md)."),
]
AgentsOption = Annotated[
    Path | None,
    typer.Option("--agents", dir_okay=False, help="YAML with agents of many turns that jobs of reinforcement may train (docs/operate.md)."),
]
GradersOption = Annotated[
    GraderLevel,
    typer.Option("--graders", help="Where code of graders runs: L1, a jail; L2, a jail in a container of bubblewrap (docs/security.md)."),
]
DType = Literal["float32", "bfloat16"]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="What the engines compute in.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads of each engine; by default those that replicas leave.")
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        min=0,
        max=64,
        help="Processes per base model that serve what is deployed and nothing else. 0: the engine does. Default: one, started when it is wanted.",
    ),
]
